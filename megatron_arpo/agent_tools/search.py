"""The <search> tool: answers from a file of earlier searches and, where that has none, from a local BM25 index."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_arpo.agent_tools.parse import cut_text
from megatron_arpo.types import ToolResult

PAGE_START = re.compile(r"^Page \d+: ", re.MULTILINE)


class SearchTool:
    """Looks a query up in the cache first, exactly but for outer white space and double quotes.

    The index holds the passages of `corpus_path`, a jsonl of {"id", "title", "text"} or {"contents"}, or else those of
    the cache's own results. `top_k` bounds how many of them answer. Raises ValueError for a file that is missing or in
    another form.

    Example: SearchTool(cache_path="search_cache.json", corpus_path=None, top_k=2, max_result_chars=8000) may answer
    "Page 1: Madrid is the capital of Spain.\\nPage 2: Spain lies in Europe."
    """

    name = "search"

    def __init__(
        self,
        *,
        cache_path: Path | str,
        corpus_path: Path | str | None = None,
        top_k: int,
        max_result_chars: int,
        no_results_text: str = "No results found.",
    ) -> None:
        if top_k < 1:
            raise ValueError(f"tools.search.top_k={top_k} must be at least 1")
        self._cache = _read_cache(Path(cache_path))
        self._corpus_path = None if corpus_path is None else Path(corpus_path)
        if self._corpus_path is not None and not self._corpus_path.is_file():
            raise ValueError(_corpus_error(self._corpus_path, "is not a file"))
        self._top_k = top_k
        self._max_result_chars = max_result_chars
        self._no_results_text = no_results_text
        self._index: _PassageIndex | None = None
        self._building = asyncio.Lock()

    async def start(self) -> None:
        """Builds the index in a thread, once; otherwise the first miss does. ValueError for a broken corpus."""
        async with self._building:
            if self._index is None:
                self._index = await asyncio.to_thread(self._build_index)

    async def call(self, query: str, timeout_s: float) -> ToolResult:
        started = time.monotonic()
        query = query.strip()
        for key in (query, query.replace('"', "")):
            if key in self._cache:
                return self._result(self._cache[key], started, cached=True)
        try:
            async with asyncio.timeout(timeout_s):
                await self.start()
                passages = await asyncio.to_thread(self._index.search, query, self._top_k)
        except TimeoutError:
            text = f"The search was stopped: it took more than {timeout_s:g} seconds."
            return ToolResult(text=text, status="timeout", latency_s=time.monotonic() - started)
        pages = (f"Page {number}: {passage}" for number, passage in enumerate(passages, 1))
        return self._result("\n".join(pages) or self._no_results_text, started, cached=False)

    async def close(self) -> None:
        """Nothing is held open."""

    def _result(self, text: str, started: float, cached: bool) -> ToolResult:
        text = cut_text(text, self._max_result_chars)
        return ToolResult(text=text, status="ok", latency_s=time.monotonic() - started, cached=cached)

    def _build_index(self) -> _PassageIndex:
        if self._corpus_path is None:
            return _PassageIndex(cache_passages(self._cache))
        return _PassageIndex(_read_corpus(self._corpus_path))


class _PassageIndex:
    """BM25 over passages.

    Example: _PassageIndex(["the red fox", "the blue sea"]).search("fox", top_k=5) == ["the red fox"].
    """

    def __init__(self, passages: list[str]) -> None:
        import bm25s

        self._passages = passages
        self._tokenize = bm25s.tokenize
        tokens = bm25s.tokenize(passages, stopwords="english", show_progress=False)
        self._bm25 = bm25s.BM25() if tokens.vocab.keys() - {""} else None
        if self._bm25 is not None:
            self._bm25.index(tokens, show_progress=False)

    def search(self, query: str, top_k: int) -> list[str]:
        """Up to `top_k` passages that share a word with `query`, best first."""
        tokens = self._tokenize([query], stopwords="english", return_ids=False, show_progress=False)
        if self._bm25 is None or not tokens[0]:
            return []
        found, scores = self._bm25.retrieve(tokens, k=min(top_k, len(self._passages)), show_progress=False)
        return [self._passages[index] for index, score in zip(found[0], scores[0], strict=True) if score > 0]


def cache_passages(cache: Mapping[str, str]) -> list[str]:
    """Distinct passages of the cached results, those in the form "Page 1: ...\\nPage 2: ...", first seen first."""
    passages: dict[str, None] = {}
    for text in cache.values():
        if PAGE_START.match(text):
            passages.update(dict.fromkeys(passage.strip() for passage in PAGE_START.split(text)))
    passages.pop("", None)
    return list(passages)


def _read_cache(path: Path) -> dict[str, str]:
    try:
        cache = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(_cache_error(path, f"can't be read ({error})")) from error
    except json.JSONDecodeError as error:
        raise ValueError(_cache_error(path, f"is not JSON ({error})")) from error
    if not isinstance(cache, dict) or not all(isinstance(text, str) for text in cache.values()):
        raise ValueError(_cache_error(path, "is not an object from query to result text"))
    return {query.strip(): text for query, text in cache.items()}


def _cache_error(path: Path, rule: str) -> str:
    return (
        f"tools.search.cache_path={path} {rule}; give a JSON file like "
        '{"capital of Spain": "Page 1: Madrid ..."}, or {} to search the corpus alone'
    )


def _read_corpus(path: Path) -> list[str]:
    passages = []
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            try:
                passages.append(_passage(json.loads(line)))
            except (ValueError, KeyError, TypeError) as error:
                raise ValueError(_corpus_error(path, f"line {number} is not a passage ({error!r})")) from error
    if not passages:
        raise ValueError(_corpus_error(path, "holds no passage"))
    return passages


def _passage(record: dict[str, Any]) -> str:
    if "contents" in record:
        return " ".join(record["contents"].split())
    title, text = record.get("title", ""), record["text"]
    return " ".join((f"{title}: {text}" if title else text).split())


def _corpus_error(path: Path, rule: str) -> str:
    return (
        f"tools.search.corpus_path={path} {rule}; give a jsonl file with "
        '{"id", "title", "text"} or {"contents"} on each line, or leave it out to index the cache'
    )
