"""Scheduling: budget, order, forks, prefix hits, preemption; on a model of integers that notices every wrong page."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from simulation import EOS, VOCAB, Simulation

from rlkernel.engine.sampling_params import SamplingParams
from rlkernel.engine.table import ceil_div


def no_stop(max_tokens: int, n: int = 1) -> SamplingParams:
    return SamplingParams(max_tokens=max_tokens, n=n, ignore_eos=True)


def test_decodes_come_first_and_prefill_fills_the_budget():
    sim = Simulation(num_pages=64, page_size=4, max_num_seqs=4, budget=6)
    sim.add([1, 2, 3], no_stop(4), 0)
    sim.add([2] * 10, no_stop(2), 1)
    step = sim.scheduler.schedule()
    assert step.query_lens.tolist() == [3, 3], "the second prompt starts in the rest of the budget"
    assert step.sample_batch.tolist() == [0]
    sim.scheduler.commit(step, *sim._forward(step), None)
    step = sim.scheduler.schedule()
    assert step.query_lens.tolist() == [1, 5] and step.starts.tolist() == [3, 3]
    assert sim.scheduler.stats.decode_tokens == 1 and sim.scheduler.stats.prefill_tokens == 11


def test_samples_share_full_prompt_pages_and_copy_only_the_tail():
    sim = Simulation(num_pages=64, page_size=4, max_num_seqs=8, budget=64)
    request = sim.add([1, 2, 3, 4, 5, 6, 1, 2, 3, 4], no_stop(3, n=5), 7)
    sim.step()
    assert sim.scheduler.stats.prefill_tokens == 10 and sim.scheduler.stats.forks == 4
    tables = [pages for pages in sim.holders()]
    assert len(tables) == 5 and len({tuple(pages[:2]) for pages in tables}) == 1
    assert len({pages[2] for pages in tables}) == 5
    assert sim.blocks.references(tables[0][0]) == 5
    sim.run()
    sim.check_outputs([request])
    assert len({tuple(s.tokens) for s in request.sequences}) > 1, "each sample has its own seed"


def test_equal_prompts_of_other_requests_share_too_unless_prefix_caching_is_off():
    for caching in (True, False):
        sim = Simulation(num_pages=64, page_size=4, max_num_seqs=8, budget=64, prefix_caching=caching)
        requests = [sim.add([1, 2, 3, 4, 5], no_stop(2), seed) for seed in range(3)]
        sim.step()
        assert sim.scheduler.stats.forks == (2 if caching else 0)
        sim.run()
        sim.check_outputs(requests)


def test_common_prefix_is_shared_within_one_step():
    sim = Simulation(num_pages=64, page_size=4, max_num_seqs=8, budget=64)
    requests = [sim.add([1] * 8 + [i, 2, 3], no_stop(2), i) for i in range(1, 5)]
    sim.step()
    assert sim.scheduler.stats.prefill_tokens == 11 + 3 * 3 and sim.scheduler.stats.cached_tokens == 3 * 8
    sim.run()
    sim.check_outputs(requests)
    assert requests[1].sequences[0].cached_tokens == 8


def test_whole_prompt_in_the_cache_still_computes_its_last_token():
    sim = Simulation(num_pages=16, page_size=4, max_num_seqs=2, budget=64)
    first = sim.add([1, 2, 3, 4, 5, 6, 1, 2], no_stop(1), 0)
    sim.run()
    second = sim.add([1, 2, 3, 4, 5, 6, 1, 2], no_stop(1), 1)
    sim.run()
    assert sim.scheduler.stats.prefill_tokens == 8 + 4, "one of two full pages is taken from the cache"
    sim.check_outputs([first, second])


@pytest.mark.parametrize("ahead", [0, 1])
def test_preempted_sequences_go_on_where_they_were(ahead):
    sim = Simulation(num_pages=6, page_size=2, max_num_seqs=3, budget=32, ahead=ahead)
    requests = [sim.add([1 + i, 2], no_stop(9), i) for i in range(3)]
    sim.run()
    assert sim.scheduler.stats.preemptions >= 2
    sim.check_outputs(requests)


def test_the_oldest_sequence_is_never_preempted():
    sim = Simulation(num_pages=6, page_size=2, max_num_seqs=3, budget=32)
    oldest = sim.add([1, 2], no_stop(10), 0)
    for i in range(4):
        sim.add([2 + i, 2], no_stop(10), i)
    steps = 0
    while oldest.unfinished:
        sim.step()
        steps += 1
    assert steps == 10


def test_fewer_rows_than_samples():
    sim = Simulation(num_pages=64, page_size=4, max_num_seqs=2, budget=64)
    request = sim.add([1, 2, 3, 4, 5, 6], no_stop(4, n=5), 3)
    sim.run()
    sim.check_outputs([request])


def test_a_step_ahead_runs_one_token_too_many_and_drops_it():
    """A sequence that stops by an id is noticed one step late; one that reaches its limit is not."""
    steps = {}
    for params in (no_stop(5), SamplingParams(max_tokens=30, stop_token_ids=list(range(1, VOCAB)))):
        for ahead in (0, 1):
            sim = Simulation(num_pages=64, page_size=4, max_num_seqs=8, budget=64, ahead=ahead)
            request = sim.add([1, 2], params, 11)
            sim.run()
            sim.check_outputs([request])
            steps[params.ignore_eos, ahead] = sim.scheduler.stats.steps
    assert steps == {(True, 0): 5, (True, 1): 5, (False, 0): 1, (False, 1): 2}


@pytest.mark.parametrize("ahead", [0, 1])
def test_stop_ids_and_eos(ahead):
    sim = Simulation(num_pages=64, page_size=4, max_num_seqs=8, budget=64, ahead=ahead)
    params = SamplingParams(max_tokens=30, n=8, stop_token_ids=[3, 5])
    request = sim.add([1, 2], params, 11)
    sim.run()
    sim.check_outputs([request])
    reasons = {sequence.stop_reason for sequence in request.sequences}
    assert {3, 5} & reasons or EOS in reasons


def test_clear_drops_everything():
    sim = Simulation(num_pages=16, page_size=2, max_num_seqs=2, budget=4)
    for i in range(4):
        sim.add([1, 2, 3, i], no_stop(4), i)
    sim.step()
    sim.step()
    sim.scheduler.clear()
    sim.blocks.check()
    assert not sim.scheduler.busy and sim.blocks.available == 16 and sim.scheduler.schedule() is None
    again = sim.add([1, 2, 3, 1], no_stop(4), 1)
    sim.run()
    sim.check_outputs([again])


def test_clear_after_an_error_while_a_sequence_is_admitted(monkeypatch):
    """Rows and pages of the sequence that was being admitted must not be lost, nor those admitted before it."""
    sim = Simulation(num_pages=16, page_size=2, max_num_seqs=3, budget=64)
    for i in range(3):
        sim.add([1, 2, 3, i + 4], no_stop(4), i)
    load, loads = sim.table.load, []

    def failing(*arguments):
        loads.append(arguments)
        if len(loads) == 2:
            raise ValueError("a prompt names media that were dropped")
        load(*arguments)

    monkeypatch.setattr(sim.table, "load", failing)
    with pytest.raises(ValueError, match="media"):
        sim.step()
    sim.scheduler.clear()
    sim.blocks.check()
    assert sim.blocks.available == 16
    again = [sim.add([1, 2, 3, i], no_stop(4), i) for i in range(3)]
    sim.step()
    assert len(sim.scheduler.running) == 3
    sim.run()
    sim.check_outputs(again)


PROMPTS = st.lists(st.integers(1, 2), min_size=1, max_size=12)
PARAMS = st.builds(
    SamplingParams,
    max_tokens=st.integers(1, 10),
    n=st.integers(1, 4),
    ignore_eos=st.booleans(),
    stop_token_ids=st.sampled_from([(), (3,), (2, VOCAB - 1)]),
)


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    prompts=st.lists(st.tuples(PROMPTS, PARAMS, st.integers(0, 3)), min_size=1, max_size=8),
    page_size=st.sampled_from([1, 2, 3, 4, 16]),
    spare=st.integers(0, 12),
    max_num_seqs=st.integers(1, 8),
    budget=st.sampled_from([1, 2, 5, 16, 64]),
    prefix_caching=st.booleans(),
    ahead=st.integers(0, 1),
)
def test_completions_depend_on_nothing_but_the_request(
    prompts, page_size, spare, max_num_seqs, budget, prefix_caching, ahead
):
    pages = max(ceil_div(len(p) + q.max_tokens - 1, page_size) for p, q, _ in prompts) + spare
    sim = Simulation(
        num_pages=pages, page_size=page_size, max_num_seqs=max_num_seqs, budget=budget, prefix_caching=prefix_caching,
        ahead=ahead,
    )  # fmt: skip
    requests = [sim.add(*prompt) for prompt in prompts]
    sim.run()
    sim.check_outputs(requests)


class EngineMachine(RuleBasedStateMachine):
    """Requests arrive between steps, weights change when the engine is idle."""

    def __init__(self):
        super().__init__()
        self.sim = Simulation(num_pages=9, page_size=3, max_num_seqs=4, budget=7, ahead=1)
        self.requests = []

    @rule(prompt=PROMPTS, params=PARAMS, seed=st.integers(0, 3))
    def add(self, prompt, params, seed):
        self.requests.append(self.sim.add(prompt, params, seed))

    @rule(count=st.integers(1, 8))
    def steps(self, count):
        for _ in range(count):
            self.sim.step()

    @precondition(lambda self: not self.sim.scheduler.busy)
    @rule()
    def new_weights(self):
        self.sim.blocks.clear_cache()
        self.sim.kv += 1  # from now on every hit on an old page is wrong

    @invariant()
    def books_balance(self):
        self.sim.blocks.check(self.sim.holders())
        assert len(self.sim.scheduler.running) == len(self.sim.scheduler.order)

    def teardown(self):
        self.sim.run()
        self.sim.check_outputs(self.requests)


TestEngineMachine = EngineMachine.TestCase
TestEngineMachine.settings = settings(max_examples=30, stateful_step_count=25, deadline=None, derandomize=True)


@pytest.mark.parametrize("broken", ["stale page", "early release", "late token"])
def test_the_simulation_can_fail(broken, monkeypatch):
    """Control: with a bug planted in the pages, the same checks do not pass."""
    sim = Simulation(num_pages=8, page_size=2, max_num_seqs=3, budget=32, ahead=int(broken == "late token"))
    requests = [sim.add([1, 2, 1, 2, i], no_stop(6), i) for i in range(1, 4)]
    if broken == "stale page":
        sim.run()
        sim.kv += 1  # the weights change without `weights_updated`
        requests = [sim.add([1, 2, 1, 2, 1], no_stop(6), 9)]
    elif broken == "early release":
        monkeypatch.setattr(sim.blocks, "share", lambda pages: None)
    else:
        monkeypatch.setattr(sim, "_token", lambda row, at: max(0, int(sim.table.tokens[row, at])))
    with pytest.raises((AssertionError, KeyError)):
        sim.run()
        sim.check_outputs(requests)
