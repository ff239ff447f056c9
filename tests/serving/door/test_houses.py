"""Several models behind one door: each request reaches its own model's instances, all share gate and counters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families
from ref_door import World
from ref_instance import answer_of
from ref_waiting import until
from ref_words import text_of

from poolweave.serving.instance.named_model import NamedModel
from poolweave.types import Role

PROMPT = [50, 60, 70] * 8


@pytest.fixture
def world(make_world: Callable[..., World], words: Any) -> World:
    """Two models; of the second the decode station is missing."""
    made = make_world(models=tuple(NamedModel(name=name, path=str(words)) for name in ("a", "b")))
    for name, role in (("p.a", Role.PREFILL), ("d.a", Role.DECODE), ("p.b", Role.PREFILL)):
        made.add(name, role)
    until(lambda: made.usable == 3, "each is linked once, by its own model's house")
    return made


def test_requests_go_to_their_models_instances_and_counters_are_one_page(world: World) -> None:
    assert world.client.get("/ready").json()["error"]["message"] == (
        "1 of 1 instances of b are up, which is not enough"
    )
    world.add("d.b", Role.DECODE)
    until(lambda: world.client.get("/ready").status_code == 200, "both models can be answered")
    listed = world.client.get("/v1/models").json()["data"]
    assert [one["id"] for one in listed] == ["a", "b"]
    for model, length in (("a", 3), ("b", 5)):
        answer = world.post(model=model, prompt=PROMPT, max_tokens=length, temperature=0)
        assert answer.status_code == 200, answer.text
        assert answer.json()["model"] == model
        assert answer.json()["choices"][0]["text"] == text_of(answer_of(PROMPT, length))
        own = {name for name, thread in world.instances.items() if thread.instance.log}
        assert own == {name for name in ("p.a", "d.a", "p.b", "d.b") if name[-1] <= model}
    families = list(text_string_to_metric_families(world.client.get("/metrics").text))
    assert len({family.name for family in families}) == len(families)
    generated = next(family for family in families if family.name == "vllm:generation_tokens")
    totals = {s.labels["model_name"]: s.value for s in generated.samples if s.name.endswith("_total")}
    assert totals == {"a": 3.0, "b": 5.0}
    figures = world.client.get("/deployment").json()
    assert (figures["model"], figures["routed"], len(figures["instances"])) == ("a, b", 2, 4)


def test_another_model_is_refused_with_those_there_are(world: World) -> None:
    for answer in (world.post(model="c", prompt=PROMPT), world.client.get("/v1/models/c")):
        assert answer.status_code == 404
        assert answer.json()["error"]["message"] == "the model 'c' is not served here; there is 'a', 'b'"
