"""The door as OpenAI's own client sees it: whole answers, streams, usage, stops, caches, errors."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

import httpx
import openai
import pytest
from ref_door import World
from ref_instance import answer_of
from ref_waiting import until
from ref_words import text_of
from rich.console import Console
from typer.testing import CliRunner

from poolweave.serving.cli.app import app
from poolweave.serving.cli.top import _table
from poolweave.serving.door.prompter import load_prompter


@pytest.fixture(scope="module")
def client(world: World) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{world.door.address}/v1", api_key="any", max_retries=0) as made:
        yield made


def right_answer(words: object, prompt: str, length: int) -> str:
    return text_of(answer_of(load_prompter(str(words)).text(prompt), length))


def test_a_completion_is_the_models_answer_with_its_usage(client: openai.OpenAI, world: World, words: object) -> None:
    got = client.completions.create(model=world.model, prompt="Tell me.", max_tokens=12)
    assert got.choices[0].text == right_answer(words, "Tell me.", 12)
    assert got.choices[0].finish_reason == "length"
    assert (got.usage.prompt_tokens, got.usage.completion_tokens, got.usage.total_tokens) == (8, 12, 20)  # type: ignore[union-attr]


def test_token_ids_are_a_prompt_too(client: openai.OpenAI, world: World) -> None:
    for prompt in ([50, 51, 52], [[50, 51, 52]]):
        got = client.completions.create(model=world.model, prompt=prompt, max_tokens=5)
        assert got.choices[0].text == text_of(answer_of([50, 51, 52], 5))


def test_a_stream_of_chat_chunks_says_the_same_and_ends_with_usage(client: openai.OpenAI, world: World) -> None:
    talk = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": [{"type": "text", "text": "hi"}]}]
    whole = client.chat.completions.create(model=world.model, messages=talk, max_completion_tokens=9)  # type: ignore[arg-type]
    chunks = list(
        client.chat.completions.create(
            model=world.model, messages=talk, max_completion_tokens=9, stream=True,  # type: ignore[arg-type]
            stream_options={"include_usage": True},
        )
    )  # fmt: skip
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].usage.completion_tokens == 9
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens  # type: ignore[union-attr]


@pytest.mark.parametrize("stream", [False, True])
def test_a_stop_string_ends_the_answer_before_it(world: World, words: object, stream: bool) -> None:
    right = right_answer(words, "stop here", 40)
    stop = right[17:20]
    answer = world.post(prompt="stop here", max_tokens=40, stop=[stop, "~~~"], stream=stream)
    lines = [line for line in answer.text.splitlines() if line.startswith("data: {")]
    documents = [json.loads(line[6:]) for line in lines] if stream else [answer.json()]
    assert "".join(document["choices"][0]["text"] for document in documents) == right[: right.index(stop)]
    assert documents[-1]["choices"][0]["finish_reason"] == "stop"


def test_cached_tokens_are_told_and_a_cache_salt_shares_none(world: World) -> None:
    def cached(**fields: str) -> int:
        answer = world.post(prompt="A long text that fills several whole blocks of it." * 2, max_tokens=2, **fields)
        return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])

    assert cached() == 0
    assert cached() == 96
    assert cached(cache_salt="mine") == 0
    assert cached(cache_salt="mine") == 96
    assert cached(cache_salt="other") == 0


def test_models_are_listed_and_others_are_not_found(client: openai.OpenAI, world: World) -> None:
    assert [model.id for model in client.models.list()] == [world.model]
    assert client.models.retrieve(world.model).owned_by == "poolweave"
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        client.models.retrieve("gpt-9")
    with pytest.raises(openai.NotFoundError, match="'gpt-9' is not served here"):
        client.completions.create(model="gpt-9", prompt="x")


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"n": 2}, "n"),
        ({"best_of": 3}, "best_of"),
        ({"echo": True}, "echo"),
        ({"logprobs": 5}, "logprobs"),
        ({"presence_penalty": 0.5}, "presence_penalty"),
        ({"logit_bias": {"5": 1.0}}, "logit_bias"),
        ({"prompt": ["a", "b"]}, "prompt"),
    ],
)
def test_what_is_not_supported_is_a_typed_400_that_names_it(
    world: World, fields: dict[str, object], param: str
) -> None:
    answer = world.post(**{"prompt": "x", **fields})
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["type"], error["code"], error["param"]) == (
        "invalid_request_error", "unsupported_parameter", param
    )  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"prompt": "x", "max_tokns": 3}, "unknown parameter 'max_tokns'; did you mean 'max_tokens'?"),
        ({"prompt": "x", "temperature": -1}, "temperature: Input should be greater than or equal to 0"),
        ({"prompt": "x", "max_tokens": 5000}, "leaves room for 4095 of an answer, 5000 were asked for"),
        ({"prompt": "y" * 5000}, "the prompt has 5000 tokens, which leaves room for 0"),
        ({"prompt": "y" * 5000}, "the model has 4096 positions (max_position_embeddings in its config.json)"),
        ({"prompt": []}, "the prompt is empty"),
        ({"prompt": [5, -1]}, "prompt: token 1 is -1, which is no token id; those go from 0 to 2147483647"),
        ({"prompt": [[5, 6, 2**31]]}, "prompt: token 2 is 2147483648, which is no token id"),
        ({"prompt": [0.5]}, "prompt: token 0 is 0.5, which is no token id"),
        ({"prompt": {}}, "Input should be a valid string"),
        ({}, "prompt: Field required"),
    ],
)
def test_a_wrong_request_is_a_400_that_says_what_to_change(world: World, fields: dict[str, object], says: str) -> None:
    answer = world.post(**fields)
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_other_content_than_text_is_a_typed_400(world: World) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:,"}}
    answer = world.post("/v1/chat/completions", messages=[{"role": "user", "content": [image]}])
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content"


def test_a_clients_request_id_comes_back_and_a_strange_one_does_not(world: World) -> None:
    for path, body in (("/v1/completions", {"prompt": "x", "max_tokens": 1}), ("/v1/completions", {"prompt": []})):
        given = world.client.post(path, json={"model": world.model, **body}, headers={"X-Request-Id": "mine-7"})
        assert given.headers["x-request-id"] == "mine-7"
        drawn = world.client.post(path, json={"model": world.model, **body}, headers={"X-Request-Id": "a b" * 100})
        assert re.fullmatch(r"[0-9a-f]{32}", drawn.headers["x-request-id"])


def test_the_same_seed_is_sent_to_both_phases_and_negative_ones_are_taken(world: World) -> None:
    assert world.post(prompt="x", max_tokens=2, seed=-1, temperature=0.7).status_code == 200


def metrics(world: World) -> str:
    return httpx.get(f"{world.door.address}/metrics", timeout=60).text


def test_metrics_have_vllms_names(world: World) -> None:
    world.post(prompt="count me", max_tokens=3)
    until(lambda: "vllm:kv_cache_usage_perc{" in metrics(world), "the instances' figures are heard")
    text = metrics(world)
    for name in (
        "vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc",
        "vllm:request_success_total", "vllm:prompt_tokens_total", "vllm:generation_tokens_total",
        "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total", "vllm:time_to_first_token_seconds_bucket",
        "vllm:inter_token_latency_seconds_bucket", "vllm:e2e_request_latency_seconds_count",
    ):  # fmt: skip
        assert f"{name}{{" in text, name
    assert f'vllm:request_success_total{{finished_reason="length",model_name="{world.model}"}}' in text


def test_process_ids_are_told_as_long_as_there_are_any(world: World) -> None:
    found = world.client.get("/deployment").json()
    assert found["pid"] == os.getpid(), "all are of this process"
    assert {one["name"]: one["pid"] for one in found["instances"]} == dict.fromkeys(world.instances, os.getpid())
    shown = CliRunner().invoke(app, ["top", world.door.address, "--once"], env={"COLUMNS": "160"}).output
    assert f"(door: pid {os.getpid()})" in shown
    assert all(str(os.getpid()) in line for line in shown.splitlines() if "-0" in line or "-1" in line)
    one = {**found["instances"][0], "pid": None, "state": "unreachable"}
    lost = {**found, "instances": [one]}
    console = Console(width=160)
    with console.capture() as capture:
        console.print(_table(lost))
    assert re.search(rf"{one['name']} +│ +- +│", capture.get())
