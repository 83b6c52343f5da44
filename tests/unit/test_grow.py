"""Trees grown on a scripted engine whose tokens are characters: `<t>..</t>` calls a tool, `<r>..</r>` is its result."""

import asyncio
import dataclasses
import random
from dataclasses import dataclass

import pytest

from megatron_arpo.algorithm.branching import ArpoBranching, NoBranching, keyed_seed
from megatron_arpo.algorithm.entropy import probe_entropy
from megatron_arpo.engine.base import EngineDied
from megatron_arpo.engine.scripted import ScriptedEngine, ScriptedReply
from megatron_arpo.rollout.base import RolloutLimits, SamplingSettings
from megatron_arpo.rollout.grow import grow_tree
from megatron_arpo.types import Prompt, ToolCall, ToolResult, VersionRun

PROMPT = Prompt(prompt_id="p", messages=({"role": "user", "content": "Q:"},), answer=("5",))
VOCAB_SIZE = 128
PROBE = 4
ALWAYS = {"alpha": 1.0, "beta": 0.0}
NEVER = {"alpha": 0.0, "beta": 0.0}


@dataclass(frozen=True)
class CharacterCodec:
    stop: tuple[str, ...] = ("</t>",)

    def decode(self, token_ids):
        return "".join(map(chr, token_ids))

    def encode_result(self, text):
        return ids(f"<r>{text}</r>")

    def parse(self, text):
        _, opened, arguments = text.removesuffix("</t>").rpartition("<t>")
        return ToolCall(name="t", arguments=arguments) if opened else None


def ids(text):
    return tuple(map(ord, text))


def reply(text, entropy=1.0):
    return ScriptedReply(
        token_ids=ids(text),
        logprobs=tuple(-0.01 * (index + 1) for index in range(len(text))),
        entropies=(entropy,) * len(text),
        entropy_errors=(0.125,) * len(text),
        stop_text="</t>" if text.endswith("</t>") else None,
    )


def asks(num_calls):
    """A model that calls the tool `num_calls` times, then answers; the seed shows in every turn: no two are alike."""

    def script(token_ids, seed):
        turn = CharacterCodec().decode(token_ids).count("</r>")
        salt = f"{(seed or 0) % 9973:04d}"
        return reply(f"think{salt}<t>{turn}-{salt}</t>" if turn < num_calls else f"the answer {salt}.", entropy=1.0 + turn)

    return script


def says(*turns):
    """A model whose turns are given."""
    return lambda token_ids, seed: reply(turns[CharacterCodec().decode(token_ids).count("</r>")])


async def at_once(call):
    return ToolResult(text=f"got {call.arguments}", status="ok")


def arpo(num_rollouts, num_initial, **changes):
    settings = {"probe_tokens": PROBE, **ALWAYS} | changes
    return ArpoBranching(num_rollouts=num_rollouts, num_initial=num_initial, **settings)


def grow(engine, branching, run_tool=at_once, max_response_tokens=10_000, max_tool_calls=3, temperature=1.0, seed=0):
    growing = grow_tree(
        PROMPT,
        ids("Q:"),
        engine=engine,
        run_tool=run_tool,
        codec=CharacterCodec(),
        branching=branching,
        limits=RolloutLimits(max_response_tokens=max_response_tokens, max_tool_calls=max_tool_calls),
        sampling=SamplingSettings(temperature=temperature),
        seed=seed,
    )
    return asyncio.run(asyncio.wait_for(growing, timeout=4))


def engine_of(script, **options):
    return ScriptedEngine(script, vocab_size=VOCAB_SIZE, **options)


def response(tree, leaf_id):
    return CharacterCodec().decode(tree.response_token_ids(leaf_id))


def forks(tree):
    """Segment id -> children, for the tool segments where the tree forks."""
    return {parent: children for parent, children in tree.children().items() if len(children) > 1 and tree.segments[parent].kind == "tool"}


def num_fresh(tree, num_initial):
    return len(tree.children()[0]) - num_initial


def test_one_greedy_trajectory_in_full():
    engine = engine_of(says("a<t>1+1</t>", "2."))
    tree = grow(engine, NoBranching(num_rollouts=1), temperature=0.0)
    prompt, call, result, answer = tree.segments
    assert [segment.kind for segment in tree.segments] == ["prompt", "model", "tool", "model"]
    assert prompt.token_ids == ids("Q:")
    assert call.token_ids == ids("a<t>1+1</t>") and call.finish_reason == "tool_call"
    assert result.token_ids == ids("<r>got 1+1</r>"), "what the codec encodes, and nothing else"
    assert result.tool_call == ToolCall(name="t", arguments="1+1") and result.tool_result.text == "got 1+1"
    assert result.logprobs == () == result.entropies
    assert answer.token_ids == ids("2.") and answer.finish_reason == "stop" and answer.decision is None
    assert answer.logprobs == (-0.01, -0.02) and answer.max_entropy_error == 0.125
    assert tree.leaf_ids == (3,) and tree.leaf_budget == 1
    assert tree.root_entropy == pytest.approx(probe_entropy([1.0] * 11, 20, VOCAB_SIZE))
    assert [request.token_ids for request in engine.requests] == [ids("Q:"), ids("Q:a<t>1+1</t><r>got 1+1</r>")]
    assert all(request.temperature == 0.0 and request.stop == ("</t>",) for request in engine.requests)


def test_greedy_copies_are_refused():
    with pytest.raises(ValueError, match="would give copies"):
        grow(engine_of(says("x")), NoBranching(num_rollouts=2), temperature=0.0)


@pytest.mark.parametrize("fork_budget", ["keyed", "shared"])
@pytest.mark.parametrize("changes", [ALWAYS, NEVER, {"alpha": 0.4, "beta": 0.0}, {"beam_size": 3}])
@pytest.mark.parametrize(("num_rollouts", "num_initial"), [(1, 1), (4, 4), (8, 1), (11, 4)])
@pytest.mark.parametrize("num_calls", [0, 1, 3])
def test_exactly_m_leaves_none_a_copy(fork_budget, changes, num_rollouts, num_initial, num_calls):
    engine = engine_of(asks(num_calls))
    tree = grow(engine, arpo(num_rollouts, num_initial, fork_budget=fork_budget, **changes))
    assert len(tree.leaf_ids) == num_rollouts == tree.leaf_budget
    assert len({response(tree, leaf_id) for leaf_id in tree.leaf_ids}) == num_rollouts
    assert all(tree.segments[leaf_id].finish_reason == "stop" for leaf_id in tree.leaf_ids)
    assert len({request.request_id for request in engine.requests}) == len(engine.requests)
    assert sum(len(children) - 1 for children in forks(tree).values()) == sum(
        segment.decision.num_forks for segment in tree.model_segments() if segment.decision
    )


def test_a_fork_starts_at_the_tool_result_and_the_probe_stays_with_the_parent():
    engine = engine_of(asks(1))
    tree = grow(engine, arpo(3, 1, beam_size=3))
    assert [segment.kind for segment in tree.segments] == ["prompt", "model", "tool", "model", "model", "model"]
    assert [segment.parent_id for segment in tree.segments] == [-1, 0, 1, 2, 2, 2]
    assert tree.leaf_ids == (3, 4, 5)
    parent, *siblings = tree.segments[3:]
    assert parent.token_ids == ids(f"the answer {response(tree, 3)[-5:]}"), "probe and remainder, nothing thrown away"
    assert parent.decision.num_forks == 2 and all(sibling.decision is None for sibling in siblings)
    _, probed, *forked = engine.requests
    assert probed.probe_tokens == PROBE and all(request.probe_tokens is None for request in forked)
    assert {request.token_ids for request in forked} == {probed.token_ids}, "the prefix the engine has in its cache"
    assert probed.token_ids == ids("Q:") + tuple(tree.response_token_ids(2))
    assert len({request.seed for request in engine.requests}) == 4


@pytest.mark.parametrize("fork_budget", ["keyed", "shared"])
def test_one_decision_a_result(fork_budget):
    """The sibling has forks left, but does not decide again on the result it was forked at."""
    tree = grow(engine_of(asks(1)), arpo(4, 1, fork_budget=fork_budget))
    assert [len(children) for children in forks(tree).values()] == [2] and num_fresh(tree, 1) == 2


def test_a_fork_starts_while_the_parent_is_still_decoding():
    """The engine's virtual decoding stands still behind the probe until the sibling's request has arrived."""
    engine = engine_of(asks(1))

    async def sleep(seconds):
        if seconds == len("the answer 0000.") - PROBE:
            while len(engine.requests) < 3:
                await asyncio.sleep(0)

    engine._sleep, engine._token_latency_s = sleep, 1.0
    assert len(grow(engine, arpo(2, 1)).leaf_ids) == 2


def test_a_completion_shorter_than_the_probe_is_decided_on_all_the_same():
    tree = grow(engine_of(says("a<t>1</t>", "ok")), arpo(2, 1))
    decision = tree.segments[3].decision
    assert decision.num_forks == 1
    assert decision.entropy == pytest.approx(probe_entropy([1.0, 1.0], PROBE, VOCAB_SIZE))
    assert decision.entropy_error == pytest.approx(probe_entropy([0.125, 0.125], PROBE, VOCAB_SIZE))


def test_every_decision_is_recorded_with_its_numbers():
    """Never forking, so that the budget lasts: a decision at every tool result, with the trajectory's own baseline."""
    tree = grow(engine_of(asks(3)), arpo(3, 2, alpha=-1.0, beta=0.5, fork_budget="shared"))
    initial = probe_entropy([1.0] * PROBE, PROBE, VOCAB_SIZE)
    for leaf_id in tree.leaf_ids[:2]:
        turns = [segment for segment in tree.path(leaf_id) if segment.kind == "model"]
        assert turns[0].decision is None and len(turns) == 4
        for turn, segment in enumerate(turns[1:], start=1):
            decision = segment.decision
            entropy = probe_entropy([1.0 + turn] * PROBE, PROBE, VOCAB_SIZE)
            assert (decision.initial_entropy, decision.entropy) == (pytest.approx(initial), pytest.approx(entropy))
            assert decision.probability == max(0.0, -1.0 + 0.5 * (decision.entropy - decision.initial_entropy))
            assert 0.0 <= decision.drawn < 1.0 and decision.num_forks == 0
    assert tree.root_entropy == pytest.approx(initial)
    fresh = tree.path(tree.leaf_ids[2])
    assert all(segment.decision is None for segment in fresh), "nothing is left to decide on"


def test_a_fork_inherits_its_parents_baseline():
    """The sibling's first own decision, one turn on, is measured against the root's first tokens."""
    tree = grow(engine_of(asks(2)), arpo(8, 1))
    decisions = [segment.decision for segment in tree.model_segments() if segment.decision]
    assert len(decisions) >= 3
    assert len({decision.initial_entropy for decision in decisions}) == 1


def test_no_probe_once_the_forks_are_spent():
    engine = engine_of(asks(3))
    grow(engine, arpo(2, 1))
    assert [request.probe_tokens for request in engine.requests].count(PROBE) == 1


def test_unspent_forks_become_fresh_trajectories():
    for fork_budget in ("keyed", "shared"):
        tree = grow(engine_of(asks(2)), arpo(7, 3, fork_budget=fork_budget, **NEVER))
        assert num_fresh(tree, num_initial=3) == 4 and not forks(tree)
        tree = grow(engine_of(asks(0)), arpo(7, 3, fork_budget=fork_budget))
        assert num_fresh(tree, num_initial=3) == 4


def test_shared_forks_go_to_the_first_that_asks():
    """Only trajectory 0 ever calls a tool; with `shared` it takes all forks, with `keyed` no more than its share."""
    first = keyed_seed(0, "p", (0,), 0)

    def script(token_ids, seed):
        called = "</r>" in CharacterCodec().decode(token_ids)
        return reply(f"{seed}<t>1</t>" if seed == first else f"{seed} done" if not called else f"{seed} the answer")

    branching = {"num_rollouts": 8, "num_initial": 4, "beam_size": 5}
    shared = grow(engine_of(script), arpo(**branching, fork_budget="shared"))
    keyed = grow(engine_of(script), arpo(**branching, fork_budget="keyed"))
    assert [len(children) for children in forks(shared).values()] == [5] and num_fresh(shared, 4) == 0
    assert [len(children) for children in forks(keyed).values()] == [2] and num_fresh(keyed, 4) == 3


def test_keyed_trees_do_not_depend_on_timing():
    branching = arpo(12, 3, alpha=0.6, beam_size=2)

    def grown(timing):
        delays = random.Random(timing)

        async def slow_tool(call):
            await asyncio.sleep(delays.choice((0.0, 0.0005, 0.002)))
            return await at_once(call)

        async def sleep(seconds):
            await asyncio.sleep(delays.choice((0.0, 0.0, 0.001)))

        return grow(engine_of(asks(3), sleep=sleep), branching, run_tool=slow_tool)

    trees = [grown(timing) for timing in range(8)]
    assert len(forks(trees[0])) > 1 and num_fresh(trees[0], 3) >= 0
    assert all(tree == trees[0] for tree in trees[1:])
    assert grow(engine_of(asks(3)), branching, seed=1) != trees[0]


def test_no_barrier():
    """One branch's tool answers only once the other initial trajectory and its three forks have ended: a round would
    never end."""
    num_rollouts, ended = 5, []
    released = asyncio.Event()
    stuck = []

    def script(token_ids, seed):
        answer = asks(2)(token_ids, seed)
        if answer.stop_text is None:
            ended.append(seed)
            if len(ended) == num_rollouts - 1:
                released.set()
        return answer

    async def run_tool(call):
        if not stuck:
            stuck.append(call)
            await released.wait()
        return await at_once(call)

    tree = grow(engine_of(script), arpo(num_rollouts, 2, fork_budget="shared"), run_tool=run_tool)
    assert len(tree.leaf_ids) == num_rollouts and len(forks(tree)) > 0


def test_call_limit_ends_the_trajectory_at_its_call():
    calls = []

    async def run_tool(call):
        calls.append(call)
        return await at_once(call)

    tree = grow(engine_of(asks(9)), NoBranching(num_rollouts=2), run_tool=run_tool, max_tool_calls=2)
    assert len(calls) == 4
    for leaf_id in tree.leaf_ids:
        leaf = tree.segments[leaf_id]
        assert leaf.finish_reason == "call_limit" and response(tree, leaf_id).endswith("</t>"), "no invented end of text"
        assert [segment.kind for segment in tree.path(leaf_id)].count("tool") == 2
    tree = grow(engine_of(asks(9)), NoBranching(num_rollouts=1), run_tool=run_tool, max_tool_calls=0)
    assert tree.segments[tree.leaf_ids[0]].finish_reason == "call_limit" and len(calls) == 4


def test_response_length_counts_results_and_cuts_none():
    call, result, answer = "a<t>1</t>", "<r>got 1</r>", "abcdef"
    fits = len(call) + len(result) + 1

    def leaf(max_response_tokens):
        engine = engine_of(says(call, answer))
        tree = grow(engine, NoBranching(num_rollouts=1), max_response_tokens=max_response_tokens)
        return response(tree, tree.leaf_ids[0]), tree.segments[tree.leaf_ids[0]]

    assert leaf(fits + 5)[0] == call + result + answer
    text, segment = leaf(fits)
    assert text == call + result + "a" and segment.finish_reason == "length", "one token is left to generate"
    text, segment = leaf(fits - 1)
    assert text == call and segment.finish_reason == "length"
    assert segment.tool_call.arguments == "1" and segment.tool_result.text == "got 1", "the call that was made is kept"
    text, segment = leaf(len(call))
    assert text == call and segment.finish_reason == "length" and segment.tool_call is None, "no call without any room"
    assert leaf(3)[0] == call[:3]


def test_a_call_that_does_not_parse_and_a_foreign_stop_end_the_trajectory():
    for text in ("no opening tag</t>", "plain answer"):
        tree = grow(engine_of(says(text)), NoBranching(num_rollouts=1))
        assert tree.segments[1].finish_reason == "stop" and tree.leaf_ids == (1,)


def test_probe_and_remainder_carry_the_span_of_weight_versions():
    engine = engine_of(asks(1), weight_version=7)
    tree = grow(engine, arpo(2, 1))
    assert {segment.weight_versions for segment in tree.model_segments()} == {
        (VersionRun(7, len(segment.token_ids)),) for segment in tree.model_segments()
    }
    assert {segment.weight_versions for segment in tree.segments if segment.kind != "model"} == {()}


def test_an_error_in_one_branch_cancels_the_tree_and_is_raised_as_it_is():
    cancelled = []

    async def run_tool(call):
        if len(cancelled) == 0 and call.arguments.startswith("1"):
            raise EngineDied("gone")
        if call.arguments.startswith("0") and not waiting:
            waiting.append(call)
            try:
                await asyncio.sleep(60)
            except asyncio.CancelledError:
                cancelled.append(call)
                raise
        return await at_once(call)

    waiting = []
    with pytest.raises(EngineDied, match="gone"):
        grow(engine_of(asks(2)), NoBranching(num_rollouts=3), run_tool=run_tool)
    assert cancelled == waiting != []


def test_an_engine_that_stops_without_a_word_is_an_error():
    engine = engine_of(lambda token_ids, seed: dataclasses.replace(reply(""), finish="abort"))
    with pytest.raises(RuntimeError, match="ended request p/0/0/0 without tokens"):
        grow(engine, NoBranching(num_rollouts=1))


def test_wrong_limits_and_sampling_are_refused():
    with pytest.raises(ValueError, match="max_response_tokens=0"):
        RolloutLimits(max_response_tokens=0, max_tool_calls=1)
    with pytest.raises(ValueError, match="max_tool_calls=-1"):
        RolloutLimits(max_response_tokens=1, max_tool_calls=-1)
    with pytest.raises(ValueError, match="temperature=-1"):
        SamplingSettings(temperature=-1)
    with pytest.raises(ValueError, match="top_p=0"):
        SamplingSettings(top_p=0)
