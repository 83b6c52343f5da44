import asyncio
import math

import pytest

from megatron_arpo.engine.base import GenerateRequest
from megatron_arpo.engine.scripted import ScriptedEngine, ScriptedReply

REPLY = ScriptedReply(
    token_ids=(5, 6, 7, 8),
    logprobs=(-0.1, -0.2, -0.3, -0.4),
    entropies=(1.0, 2.0, 3.0, 4.0),
    stop_text="</t>",
)


def an_engine(seeds=None, **options):
    def script(token_ids, seed):
        if seeds is not None:
            seeds.append(seed)
        return REPLY

    return ScriptedEngine(script, vocab_size=16, **options)


async def completions(engine, **changes):
    request = {"request_id": "r", "token_ids": (1, 2), "max_tokens": 10, "seed": 3} | changes
    return [completion async for completion in engine.generate(GenerateRequest(**request))]


def test_probe_first_then_the_remainder():
    probe, rest = asyncio.run(completions(an_engine(), probe_tokens=3))
    assert (probe.token_ids, probe.finish_reason, probe.stop_text) == ((5, 6, 7), "probe", None)
    assert (rest.token_ids, rest.finish_reason, rest.stop_text) == ((8,), "stop", "</t>")
    assert rest.logprobs == (-0.4,) and rest.entropies == (4.0,) and rest.entropy_errors == (0.0,)
    (whole,) = asyncio.run(completions(an_engine(), probe_tokens=4))
    assert whole.token_ids == (5, 6, 7, 8) and whole.finish_reason == "stop"


def test_max_tokens_cuts_and_hides_the_stop():
    (completion,) = asyncio.run(completions(an_engine(), max_tokens=3))
    assert (completion.token_ids, completion.finish_reason, completion.stop_text) == ((5, 6, 7), "length", None)
    (completion,) = asyncio.run(completions(an_engine(), max_tokens=4))
    assert completion.finish_reason == "stop"


def test_a_token_takes_its_time_and_greedy_has_no_seed():
    slept, seeds = [], []

    async def sleep(seconds):
        slept.append(seconds)

    engine = an_engine(seeds, token_latency_s=0.5, sleep=sleep)
    asyncio.run(completions(engine, probe_tokens=3))
    asyncio.run(completions(engine, temperature=0.0))
    assert slept == [1.5, 0.5, 2.0] and seeds == [3, None]


def test_requests_in_flight_stop_for_new_weights_and_go_on():
    async def run():
        engine = an_engine(weight_version=1)
        request = GenerateRequest(request_id="old", token_ids=(1,), max_tokens=10, probe_tokens=2)
        old = engine.generate(request)
        probe = await anext(old)
        await engine.receive_buckets(2, [0])
        await engine.begin_weights("keep")
        rest, new = asyncio.create_task(anext(old)), asyncio.create_task(completions(engine))
        await asyncio.sleep(0.005)
        assert not rest.done() and not new.done()
        await engine.load_buckets(2, [0])
        await engine.commit_weights(2)
        return [probe, await rest, *await new]

    found = asyncio.run(asyncio.wait_for(run(), timeout=4))
    assert [run.version for completion in found for run in completion.weight_versions] == [1, 2, 2]


def test_a_version_that_was_not_received_is_not_loaded():
    async def run():
        engine = an_engine(weight_version=1)
        await engine.begin_weights("keep")
        with pytest.raises(ValueError, match=r"buckets \[1\] have not been received"):
            await engine.load_buckets(2, [1])
        await engine.abandon_weights()
        (after,) = await completions(engine)
        return after

    assert asyncio.run(asyncio.wait_for(run(), timeout=4)).weight_versions[0].version == 1


def test_score_is_uniform_without_a_scorer():
    assert asyncio.run(an_engine().score([1, 2, 3])) == [pytest.approx(-math.log(16))] * 2
    assert asyncio.run(an_engine(scorer=lambda ids: [-1.0]).score([1, 2])) == [-1.0]
