"""The tools of a configuration, started and behind one runner."""

from __future__ import annotations

from megatron_arpo.agent_tools.base import Tool
from megatron_arpo.agent_tools.python import PythonTool
from megatron_arpo.agent_tools.runner import ToolRunner
from megatron_arpo.agent_tools.search import SearchTool
from megatron_arpo.config.tools import ToolSettings


async def build_tools(settings: ToolSettings) -> ToolRunner:
    """Starts what is configured. Raises ValueError for a file that can't be read, RuntimeError where the sandbox can't run."""
    tools: dict[str, Tool] = {}
    if settings.search is not None:
        search = _search_tool(settings)
        await search.start()
        tools["search"] = search
    if settings.python is not None:
        python = PythonTool(
            sandbox=settings.python.sandbox,
            max_concurrent=settings.max_concurrent,
            memory_mb=settings.python.memory_mb,
            max_output_bytes=settings.python.max_output_bytes,
            preload=settings.python.preload,
        )
        await python.start()
        tools["python"] = python
    return ToolRunner(
        tools,
        timeout_s=settings.timeout_s,
        num_tries=settings.num_tries,
        max_concurrent=settings.max_concurrent,
        max_result_chars=settings.max_result_chars,
    )


def check_tools(settings: ToolSettings) -> None:
    """Raises ValueError for a file of the tools that can't be read; starts nothing."""
    if settings.search is not None:
        _search_tool(settings)


def _search_tool(settings: ToolSettings) -> SearchTool:
    return SearchTool(
        cache_path=settings.search.cache_path,
        corpus_path=settings.search.corpus_path,
        top_k=settings.search.top_k,
        max_result_chars=settings.max_result_chars,
    )
