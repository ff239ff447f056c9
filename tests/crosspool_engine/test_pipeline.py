"""The pipeline under random drivers: turns alternate, no layer is skipped or run twice, nobody starves."""

from __future__ import annotations

import math
from collections import Counter, defaultdict

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from poolweave.crosspool_engine.pipeline import Batch, Pipeline, PipelineConfig, PipelineModel, Turn
from poolweave.errors import ConfigError

MODELS = {
    "deep": PipelineModel(num_layers=5, layer_s=1.0, owners=((0,), (1,), (0, 1), (2,), (0, 1, 2))),
    "shallow": PipelineModel(num_layers=1, layer_s=0.5),
    "slow": PipelineModel(num_layers=3, layer_s=4.0, owners=((1,), (1, 2), (0,))),
}
CYCLES = {
    False: [Turn.ATTENTION, Turn.FFN],
    True: [Turn.ATTENTION, Turn.TO_FFN, Turn.FFN, Turn.TO_ATTENTION],
}


def steps_of(model: str, transfers: bool) -> list[tuple[int, Turn]]:
    """The whole life of a batch: every turn of every layer, an FFN turn a rank of the layer, then the sampling turn."""
    layers = MODELS[model].num_layers
    turns = {layer: {Turn.FFN: len((MODELS[model].owners or ((0,),) * layers)[layer])} for layer in range(layers)}
    steps = [
        (layer, turn) for layer in range(layers) for turn in CYCLES[transfers] for _ in range(turns[layer].get(turn, 1))
    ]
    return [*steps, (layers, Turn.ATTENTION)]


def stage_of(batch: Batch) -> int:
    """Which of a turn's stages a batch needs: an FFN rank's own, one for all else."""
    owners = MODELS[batch.model].owners
    return owners[batch.layer][batch.part] if batch.turn is Turn.FFN and owners else 0


class PipelineMachine(RuleBasedStateMachine):
    """A driver that starts and ends stages in any order; the oracle is each batch's list of steps."""

    @initialize(in_flight=st.integers(1, 5), max_batch=st.integers(1, 4), transfers=st.booleans())
    def create(self, in_flight: int, max_batch: int, transfers: bool) -> None:
        self.config = PipelineConfig(in_flight=in_flight, max_batch=max_batch, transfers=transfers)
        self.pipeline = Pipeline(MODELS, self.config)
        self.lives: dict[int, list[tuple[int, Turn]]] = defaultdict(list)
        self.left: dict[str, int] = {}  # request -> tokens still to come, by the oracle
        self.models: dict[str, str] = {}
        self.cancelled: set[str] = set()
        self.numbers = 0

    @rule(model=st.sampled_from(sorted(MODELS)), tokens=st.integers(1, 4))
    def add(self, model: str, tokens: int) -> None:
        name = f"r{self.numbers}"
        self.numbers += 1
        self.left[name], self.models[name] = tokens, model
        self.pipeline.add(name, model)

    @precondition(lambda self: self.left)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.left)))
        held = {request for batch in self.pipeline.batches for request in batch.requests}
        self.pipeline.cancel(name)
        if name in held:
            self.cancelled.add(name)
        else:
            del self.left[name]

    @rule(data=st.data())
    def start(self, data: st.DataObject) -> None:
        turn = data.draw(st.sampled_from(self.pipeline.turns))
        here = [b for b in self.pipeline.batches if b.turn is turn]
        busy = {stage_of(b) for b in here if b.running}
        waiting = [b for b in here if not b.running and stage_of(b) not in busy]
        got = self.pipeline.start(turn)
        if not waiting:
            assert got is None
            return
        assert got is not None
        assert got.ticket == min(b.ticket for b in waiting)
        self.lives[got.number].append((got.layer, got.turn))

    @precondition(lambda self: any(b.running for b in self.pipeline.batches))
    @rule(data=st.data())
    def finish(self, data: st.DataObject) -> None:
        batch = data.draw(st.sampled_from([b for b in self.pipeline.batches if b.running]))
        self.end(batch)

    def end(self, batch: Batch) -> None:
        if not self.pipeline.is_sampling(batch):
            moved = self.pipeline.finish(batch.number)
            assert moved is not None
            assert not moved.running
            return
        for request in batch.requests:
            self.left[request] -= 1
        done = [request for request in batch.requests if not self.left[request]]
        assert self.pipeline.finish(batch.number, done) is None
        for request in batch.requests:
            if request in done or request in self.cancelled:
                del self.left[request]
                self.cancelled.discard(request)
        assert self.lives[batch.number] == steps_of(batch.model, self.config.transfers)

    @invariant()
    def lives_are_prefixes_of_the_right_one(self) -> None:
        self.pipeline.check()
        assert self.pipeline.has_work == bool(self.left)
        for batch in self.pipeline.batches:
            steps = steps_of(batch.model, self.config.transfers)
            lived = self.lives[batch.number]
            assert lived == steps[: len(lived)]
            assert (batch.layer, batch.turn) == steps[len(lived) - batch.running]

    def teardown(self) -> None:
        """Everything left finishes, within the number of steps there are: nothing hangs."""
        if not hasattr(self, "pipeline"):
            return
        budget = sum(self.left.values()) * max(len(steps_of(m, True)) for m in MODELS) + 10
        while self.pipeline.has_work:
            budget -= 1
            assert budget > 0, "work is left but nothing moves"
            for turn in self.pipeline.turns:
                batch = self.pipeline.start(turn)
                if batch is not None:
                    self.lives[batch.number].append((batch.layer, batch.turn))
            for batch in [b for b in self.pipeline.batches if b.running]:
                self.end(batch)
        assert not self.left


PipelineMachine.TestCase.settings = settings(stateful_step_count=60)
TestPipelineMachine = PipelineMachine.TestCase


def run_pass(pipeline: Pipeline) -> list[Batch]:
    """Move everything one step; -> the batches that had their sampling turn."""
    for turn in pipeline.turns:
        pipeline.start(turn)
    sampled = []
    for batch in [b for b in pipeline.batches if b.running]:
        if pipeline.finish(batch.number) is None:
            sampled.append(batch)
    return sampled


def test_two_batches_overlap_in_attention_and_ffn() -> None:
    pipeline = Pipeline(MODELS)
    pipeline.add("a", "deep")
    pipeline.add("b", "slow")
    first = pipeline.start(Turn.ATTENTION)
    assert first is not None
    assert pipeline.start(Turn.ATTENTION) is None  # one at a time
    pipeline.finish(first.number)
    second, moved = pipeline.start(Turn.ATTENTION), pipeline.start(Turn.FFN)
    assert second is not None
    assert moved is not None
    assert (second.requests, moved.requests) == (("b",), ("a",))


def test_four_in_flight_fill_four_stages() -> None:
    pipeline = Pipeline(MODELS, PipelineConfig(in_flight=4, max_batch=1, transfers=True))
    for n in range(4):
        pipeline.add(f"r{n}", "deep")
    for _ in range(3):
        run_pass(pipeline)
    assert all(pipeline.start(turn) for turn in pipeline.turns)


def test_early_exit_lets_the_next_request_in() -> None:
    pipeline = Pipeline({"m": PipelineModel(num_layers=1)}, PipelineConfig(in_flight=1, max_batch=2))
    for name in ("a", "b", "c"):
        pipeline.add(name, "m")
    assert pipeline.batches[0].requests == ("a",)  # formed at once, with what there was
    for expected in (("b", "c"), ("a", "b")):
        sampled: list[Batch] = []
        while not sampled:
            sampled = run_pass(pipeline)
        assert pipeline.batches[0].requests == expected
    while not pipeline.is_sampling(pipeline.batches[0]) or not pipeline.start(Turn.ATTENTION):
        run_pass(pipeline)
    pipeline.finish(pipeline.batches[0].number, ["a"])
    assert pipeline.batches[0].requests == ("c", "b")
    assert pipeline.stats().tokens == {"m": 5}


def test_service_time_not_passes_is_shared_evenly() -> None:
    """A model of cheap passes gets more of them, in proportion; within one pass of the dearest at any time."""
    pipeline = Pipeline(MODELS, PipelineConfig(in_flight=1, max_batch=1))
    for name in MODELS:
        pipeline.add(name, name)
    passes: Counter[str] = Counter()
    for _ in range(2000):
        passes.update(batch.model for batch in run_pass(pipeline))
        served = {name: MODELS[name].pass_s * n for name, n in pipeline.stats().passes.items()}
        assert max(served.values()) - min(served.values()) <= max(m.pass_s for m in MODELS.values())
    assert min(passes.values()) > 10


@pytest.mark.parametrize("victim", sorted(MODELS))
def test_no_request_waits_longer_than_its_share(victim: str) -> None:
    """However many others come, a model is served again after each other one had its own pass's worth."""
    pipeline = Pipeline(MODELS, PipelineConfig(in_flight=2, max_batch=1))
    for name in MODELS:
        for n in range(1 if name == victim else 50):
            pipeline.add(f"{name}{n}", name)
    own = MODELS[victim].pass_s
    bound = 2 + sum(math.ceil(own / model.pass_s) + 1 for name, model in MODELS.items() if name != victim)
    since = longest = 0
    for _ in range(3000):
        for batch in run_pass(pipeline):
            since = 0 if batch.model == victim else since + 1
            longest = max(longest, since)
    assert 0 < longest <= bound


def test_a_model_back_from_idleness_does_not_catch_up() -> None:
    pipeline = Pipeline({n: PipelineModel(num_layers=1) for n in "ab"}, PipelineConfig(in_flight=1, max_batch=1))
    pipeline.add("a", "a")
    for _ in range(300):
        run_pass(pipeline)
    pipeline.add("b", "b")
    before = pipeline.stats().passes
    for _ in range(30):
        run_pass(pipeline)
    after = pipeline.stats().passes
    assert abs((after["a"] - before["a"]) - (after["b"] - before["b"])) <= 1


def test_cancelled_while_waiting_and_in_flight() -> None:
    pipeline = Pipeline({"m": PipelineModel(num_layers=1)}, PipelineConfig(in_flight=1, max_batch=1))
    pipeline.add("flying", "m")
    pipeline.add("waiting", "m")
    pipeline.cancel("waiting")
    pipeline.cancel("flying")
    pipeline.cancel("nobody")
    assert pipeline.has_work  # its batch runs to its token
    for _ in range(3):
        run_pass(pipeline)
    assert not pipeline.has_work
    pipeline.check()


def test_misuse_is_refused() -> None:
    pipeline = Pipeline(MODELS)
    with pytest.raises(ConfigError, match="no model 'x'"):
        pipeline.add("r", "x")
    pipeline.add("r", "deep")
    with pytest.raises(ConfigError, match="here already"):
        pipeline.add("r", "deep")
    with pytest.raises(ConfigError, match="not running"):
        pipeline.finish(pipeline.batches[0].number)
    batch = pipeline.start(Turn.ATTENTION)
    assert batch is not None
    with pytest.raises(ConfigError, match="do not end in turn ATTENTION of layer 0"):
        pipeline.finish(batch.number, ["r"])
    with pytest.raises(ConfigError, match="needs a model"):
        Pipeline({})
    with pytest.raises(ConfigError, match="in_flight"):
        PipelineConfig(in_flight=0)
    with pytest.raises(ConfigError, match="layers"):
        PipelineModel(num_layers=0)
