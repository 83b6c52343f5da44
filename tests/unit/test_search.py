import asyncio
import json
import os
import time
from pathlib import Path

import pytest

from megatron_arpo.agent_tools.search import SearchTool, cache_passages

CACHE = {
    "capital of Spain": "Page 1: Madrid is the capital of Spain.\nPage 2: Spain lies in Europe.",
    "who wrote Faust": "Page 1: Goethe wrote Faust.\nPage 2: Madrid is the capital of Spain.",
    "nothing": "No search results found.",
}
SHARED_DATA = Path(os.environ.get("MEGATRON_ARPO_TEST_DATA", Path(__file__).parents[3] / "shared/data"))


def write(path, content):
    path.write_text(content if isinstance(content, str) else json.dumps(content), encoding="utf-8")
    return path


def tool(tmp_path, cache=CACHE, **changes):
    cache_path = write(tmp_path / "cache.json", cache)
    return SearchTool(**({"cache_path": cache_path, "top_k": 2, "max_result_chars": 1000} | changes))


def search(search_tool, query):
    async def run():
        await search_tool.start()
        return await search_tool.call(query, timeout_s=20)

    return asyncio.run(run())


@pytest.mark.parametrize("query", ["capital of Spain", "  capital of Spain\n", 'capital of "Spain"'])
def test_a_cached_query_answers_word_for_word(tmp_path, query):
    result = search(tool(tmp_path), query)
    assert (result.text, result.status, result.cached) == (CACHE["capital of Spain"], "ok", True)


def test_a_miss_answers_from_the_passages_of_the_cache(tmp_path):
    result = search(tool(tmp_path), "Goethe Faust author")
    assert (result.text, result.status, result.cached) == ("Page 1: Goethe wrote Faust.", "ok", False)


@pytest.mark.parametrize("query", ["zebra", "the of", "", "?!"])
def test_no_hit_is_an_answer(tmp_path, query):
    result = search(tool(tmp_path), query)
    assert (result.text, result.status, result.cached) == ("No results found.", "ok", False)
    assert search(tool(tmp_path, no_results_text="nothing"), query).text == "nothing"


def test_passages_are_taken_apart_once_each():
    assert cache_passages(CACHE) == ["Madrid is the capital of Spain.", "Spain lies in Europe.", "Goethe wrote Faust."]


def test_the_corpus_replaces_the_passages_of_the_cache(tmp_path):
    corpus = write(
        tmp_path / "corpus.jsonl",
        '{"id": 1, "title": "Rust", "text": "a language of\\nsystems"}\n\n{"contents": "iron oxide forms a crust"}\n'
        '{"id": 3, "title": "", "text": "rust eats iron oxide"}\n',
    )
    searching = tool(tmp_path, corpus_path=corpus)
    assert search(searching, "iron oxide").text.splitlines()[0].startswith("Page 1: ")
    assert set(search(searching, "iron oxide").text.splitlines()) >= {"Page 1: rust eats iron oxide"}
    assert search(searching, "systems language").text == "Page 1: Rust: a language of systems"
    assert search(searching, "Goethe Faust").text == "No results found."


def test_top_k_and_length_are_bounds(tmp_path):
    cache = {"q": "\n".join(f"Page {number}: apple number {number}" for number in range(1, 9))}
    assert len(search(tool(tmp_path, cache, top_k=3), "apple").text.splitlines()) == 3
    assert len(search(tool(tmp_path, cache, top_k=50), "apple").text.splitlines()) == 8
    assert len(search(tool(tmp_path, cache, max_result_chars=40), "q").text) == 40


@pytest.mark.parametrize("cache", [{}, {"q": ""}, {"q": "No search results found."}])
def test_a_cache_without_passages_finds_nothing(tmp_path, cache):
    assert search(tool(tmp_path, cache), "apple").text == "No results found."


@pytest.mark.parametrize(
    ("content", "rule"),
    [("{", "is not JSON"), ([1], "is not an object"), ({"q": 1}, "is not an object"), (None, "can't be read")],
)
def test_a_broken_cache_is_refused_at_construction(tmp_path, content, rule):
    path = tmp_path / "broken.json"
    if content is not None:
        write(path, content)
    with pytest.raises(ValueError, match=rf"tools\.search\.cache_path=.*broken\.json {rule}.*; give"):
        SearchTool(cache_path=path, top_k=1, max_result_chars=100)


def test_a_broken_corpus_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"tools\.search\.corpus_path=.*none\.jsonl is not a file"):
        tool(tmp_path, corpus_path=tmp_path / "none.jsonl")
    for content, rule in (('{"contents": "a b"}\n{"id": 2}\n', "line 2 is not a passage"), ("\n", "holds no passage")):
        broken = tool(tmp_path, corpus_path=write(tmp_path / "corpus.jsonl", content))
        with pytest.raises(ValueError, match=rule):
            asyncio.run(broken.start())


def test_the_index_is_built_off_the_event_loop_and_once(tmp_path, monkeypatch):
    searching = tool(tmp_path)
    build, builds = searching._build_index, []

    def slow_build():
        builds.append(1)
        time.sleep(0.3)
        return build()

    monkeypatch.setattr(searching, "_build_index", slow_build)

    async def run():
        calls = asyncio.gather(*(searching.call("Goethe", timeout_s=20) for _ in range(3)))
        ticks = 0
        while not builds or ticks < 5:
            await asyncio.sleep(0.01)
            ticks += 1
        assert not calls.done()
        return await calls

    assert {result.text for result in asyncio.run(run())} == {"Page 1: Goethe wrote Faust."}
    assert len(builds) == 1


def test_the_published_sample():
    path = SHARED_DATA / "search_cache.json"
    if not path.is_file():
        pytest.skip("no published search cache; set MEGATRON_ARPO_TEST_DATA to the folder that has search_cache.json")
    cache = json.loads(path.read_text(encoding="utf-8"))
    searching = SearchTool(cache_path=path, top_k=5, max_result_chars=8000)
    query = next(iter(cache))
    assert search(searching, query).text == cache[query]
    found = search(searching, "Amy Smart horror anthology campfire")
    assert found.text.startswith("Page 1: ") and "Campfire Tales" in found.text and not found.cached
