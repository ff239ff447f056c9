"""A model cut over ranks at one side only, and a prompt split over instances: tokens stay those of one whole model."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("torch")

import torch
from ref_parallel_worker import HBM, Parent, run
from ref_transformers import greedy, prompt_of

from poolweave.errors import ConfigError, LayoutMismatch, TransferTimeout
from poolweave.mempool import MemPool, PoolConfig
from poolweave.serving.engine import EngineConfig, SamplingParams, Sequence, TorchEngine, load_model
from poolweave.serving.engine.tensor_parallel import RankGroup, shard_model
from poolweave.serving.instance.sequence_parallel import PromptPart, SplitPrompt, split_prompt
from poolweave.transfer import Cut, TransferConfig

pytestmark = [pytest.mark.engine, pytest.mark.multiproc, pytest.mark.timeout(600)]

NUM_TOKENS = 8


@pytest.fixture(scope="module")
def workers() -> Iterator[tuple[Parent, Parent]]:
    pair = Parent(), Parent()
    yield pair
    for one in pair:
        one.close()


@pytest.fixture(scope="module")
def rendezvous(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(tmp_path_factory.mktemp("ranks") / "meet")


@dataclass
class Decoder:
    """The whole model at one instance, in this process."""

    pool: MemPool
    engine: TorchEngine
    step: int

    @classmethod
    def of(cls, stack: ExitStack, folder: Path) -> Decoder:
        torch.set_num_threads(1)
        model = load_model(folder)
        pool = stack.enter_context(MemPool(model.layout, hbm=HBM))
        return cls(pool, TorchEngine(model, pool, EngineConfig(step_tokens=1024)), model.layout.block_tokens)

    def decode(self, prompt: list[int], first: int, tag: bytes) -> Sequence:
        """Go on after `first` with the KV that came under `tag`; the sequence keeps its blocks."""
        with self.pool.receive(tag, timeout=60) as got:
            blocks = got.take()
        sampling = SamplingParams(max_new_tokens=NUM_TOKENS, ignore_eos=True)
        sequence = Sequence(
            str(tag), [*prompt, first], sampling, num_prompt=len(prompt), num_computed=len(prompt), blocks=blocks
        )
        run(self.engine, sequence)
        return sequence

    def give_back(self, sequence: Sequence, names: list[str]) -> int:
        """Index the answer and send its whole blocks to every rank. -> tokens sent"""
        whole = sequence.num_computed // self.step
        tokens, blocks = np.array(sequence.tokens[: whole * self.step], np.int32), sequence.blocks[:whole]
        self.pool.seal(blocks)
        self.pool.insert(tokens, blocks)
        for transfer in [self.pool.transfer_with_insert(name, blocks, tokens) for name in names]:
            transfer.result(60)
        self.pool.free(sequence.blocks)
        return len(tokens)


@pytest.mark.parametrize("kind", ["llama", "llama_mqa", "deepseek"])
def test_two_ranks_prefill_one_decodes_and_sends_back(
    kind: str, workers: tuple[Parent, Parent], rendezvous: str, model_folder: Callable[[str], Path]
) -> None:
    """KV heads split, one replicated head, replicated latents: two turns, each equal to `transformers`' own tokens."""
    folder = model_folder(kind)
    with ExitStack() as stack:
        decoder = Decoder.of(stack, folder)
        for rank, worker in enumerate(workers):
            worker.tell(do="rank", model=str(folder), rendezvous=rendezvous, rank=rank, size=2)
        ranks = [worker.hear() for worker in workers]
        for worker in workers:
            worker.ask(do="connect", peers=[[decoder.pool.instance, decoder.pool.address]])
        for name, address in ranks:
            decoder.pool.connect(name, address)
        prompt, cached = prompt_of(50), 0
        for turn in range(2):
            tag = f"{kind}-{turn}"
            for worker in workers:
                worker.tell(do="prefill", tokens=prompt, to=decoder.pool.instance, tag=tag)
            heard = [worker.hear() for worker in workers]
            assert heard[0] == heard[1], "ranks compute the same token"
            assert heard[0][0] == cached
            sequence = decoder.decode(prompt, heard[0][1], tag.encode())
            assert sequence.answer == greedy(folder, tuple(prompt), NUM_TOKENS)
            cached = decoder.give_back(sequence, [name for name, _ in ranks])
            prompt = [*sequence.tokens, *prompt_of(9, seed=turn + 1)]
        decoder.pool.check()


@pytest.mark.parametrize("order", ["aggregated", "layered"])
def test_a_prompt_split_over_two_instances(
    order: str, workers: tuple[Parent, Parent], model_folder: Callable[[str], Path]
) -> None:
    """The second part's instance pulls the first part's KV while both compute; the decode instance has it all."""
    folder = model_folder("llama")
    prompt = prompt_of(401)
    parts = [[part.start, part.stop] for part in split_prompt(len(prompt), 2, 16)]
    with ExitStack() as stack:
        decoder = Decoder.of(stack, folder)
        for worker in workers:
            worker.tell(do="whole", model=str(folder), order=order)
        instances = [worker.hear() for worker in workers]
        everyone = [*instances, [decoder.pool.instance, decoder.pool.address]]
        for worker in workers:
            worker.ask(do="connect", peers=everyone)
        tag = f"split-{order}"
        for index, worker in enumerate(workers):
            worker.tell(
                do="part", index=index, tokens=prompt, parts=parts, instances=[name for name, _ in instances],
                decode=decoder.pool.instance, tag=tag,
            )  # fmt: skip
        first, last = (worker.hear() for worker in workers)
        assert (first["known"], last["known"]) == (parts[0][1], 400), "each instance has indexed what it knows"
        assert first["received"] == 0
        assert last["received"] == parts[0][1] // 16 * decoder.pool.layout.block_bytes
        with decoder.pool.match(prompt) as hit:
            assert hit.num_tokens == 400
        sequence = decoder.decode(prompt, last["token"], tag.encode())
        assert sequence.answer == greedy(folder, tuple(prompt), NUM_TOKENS)
        stats = decoder.pool.stats().transfer
        assert stats is not None
        assert stats.receiving.bytes == decoder.pool.layout.num_blocks(len(prompt)) * decoder.pool.layout.block_bytes
        decoder.pool.free(sequence.blocks)
        decoder.pool.check()


def test_a_part_whose_predecessor_does_not_come_fails_in_time(model_folder: Callable[[str], Path]) -> None:
    with ExitStack() as stack:
        decoder = Decoder.of(stack, model_folder("llama"))
        prompt = SplitPrompt(
            tokens=np.arange(40, dtype=np.int32), parts=split_prompt(40, 2, 16), instances=("nobody", "here"),
            decode="nobody", tag=b"t", wait_s=0.05,
        )  # fmt: skip
        part = PromptPart(decoder.pool, prompt, 1)
        with pytest.raises(TransferTimeout, match="no growing transfer"):
            part.begin()
        part.close()
        part.close()


def test_prompts_are_split_at_blocks() -> None:
    for tokens, parts in ((1, 1), (16, 1), (17, 2), (401, 2), (401, 7), (48, 3)):
        split = split_prompt(tokens, parts, 16)
        assert [token for part in split for token in part] == list(range(tokens))
        assert all(part.start % 16 == 0 and len(part) for part in split)
    with pytest.raises(ConfigError, match="2 blocks cannot be split into 3"):
        split_prompt(32, 3, 16)


def test_cuts_that_cannot_be_are_refused(model_folder: Callable[[str], Path], tmp_path: Path) -> None:
    model = load_model(model_folder("llama"))
    with pytest.raises(ConfigError, match="2 KV heads cannot be cut for tp=3"):
        Cut(layout=model.layout, tp=3)
    eight = Cut(layout=model.layout, tp=8).shards[0]
    with pytest.raises(ConfigError, match="4 attention heads cannot be cut for tp=8"):
        shard_model(model, eight, lambda _: None)
    with pytest.raises(ConfigError, match="by tensor ranks only"):
        shard_model(model, Cut(layout=model.layout, pp=2).shards[0], lambda _: None)
    with pytest.raises(ConfigError, match="rank 2"):
        RankGroup(tmp_path / "meet", 2, 2)
    half = Cut(layout=model.layout, tp=2).shards[0]
    config = PoolConfig(transfer=TransferConfig(shard=half))
    with MemPool(model.layout, hbm=HBM, config=config) as pool, pytest.raises(LayoutMismatch, match="that shard's"):
        _ = pool.address
