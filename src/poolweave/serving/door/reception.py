"""From a client's request to what instances are asked: tokens, sampling, limits, tenant. Refuses what cannot be."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

from poolweave.errors import NoInstance
from poolweave.serving.door.ask import Ask
from poolweave.serving.door.config import KeyConfig
from poolweave.serving.door.failure import Failure, Refusal, unsupported
from poolweave.serving.door.links import Links
from poolweave.serving.door.prompter import Prompter
from poolweave.serving.door.schema import ChatRequest, CompletionRequest
from poolweave.serving.engine.sequence import SamplingParams
from poolweave.serving.tenant_quota import owner_of


class Reception:
    """Turns requests into asks. Both raise Refusal, RequestRefused, NoInstance while nobody has said what it serves."""

    def __init__(self, prompter: Prompter, links: Links) -> None:
        self._prompter = prompter
        self._links = links

    def chat(self, request: ChatRequest, tenant: KeyConfig) -> Ask:
        """Of POST /v1/chat/completions."""
        self._check(request)
        for number, message in enumerate(request.messages):
            if message.unsupported is not None:
                raise unsupported(f"messages[{number}].content", message.unsupported)
        talk = [{"role": "system" if m.role == "developer" else m.role, "content": m.text} for m in request.messages]
        return self._ask(request, tenant, "chatcmpl", self._prompter.chat(talk))

    def completion(self, request: CompletionRequest, tenant: KeyConfig) -> Ask:
        """Of POST /v1/completions."""
        self._check(request)
        return self._ask(request, tenant, "cmpl", self._tokens(request))

    def _check(self, request: ChatRequest | CompletionRequest) -> None:
        found = request.unsupported()
        if found is not None:
            raise unsupported(*found)

    def _tokens(self, request: CompletionRequest) -> list[int]:
        prompt = request.prompt
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise unsupported("prompt", f"{len(prompt)} prompts", "in one request are not supported: send one each")
            prompt = prompt[0]
        if isinstance(prompt, str):
            return self._prompter.text(prompt)
        return list(prompt)  # type: ignore[arg-type]

    def _ask(self, request: ChatRequest | CompletionRequest, tenant: KeyConfig, prefix: str, prompt: list[int]) -> Ask:
        limit = self._limit(prompt, request.limit)
        sampling = SamplingParams(
            max_new_tokens=limit,
            temperature=1.0 if request.temperature is None else request.temperature,
            top_p=1.0 if request.top_p is None else request.top_p,
            stop_token_ids=tuple(request.stop_token_ids or ()),
            stop=request.stops,
            ignore_eos=request.ignore_eos,
            # all phases and attempts must draw from the same one
            seed=secrets.randbits(63) if request.seed is None else request.seed % 2**64,
        )
        return Ask(
            request_id=f"{prefix}-{secrets.token_hex(12)}",
            prompt=prompt,
            sampling=sampling,
            owner=owner_of(tenant.name if tenant.isolated else "", request.cache_salt),
            session=request.session_id or request.user,
        )

    def _limit(self, prompt: Sequence[int], wanted: int | None) -> int:
        """Tokens of the answer at most."""
        model = self._links.model
        if model is None:
            raise NoInstance("no instance has come up yet; ask again", known=len(self._links.members))
        room = model.max_positions - len(prompt)
        if not prompt:
            raise Refusal(Failure(status=400, message="the prompt is empty", code="invalid_request", param="prompt"))
        if room < 1 or (wanted or 0) > room:
            message = (
                f"the prompt has {len(prompt)} tokens, which leaves room for {max(0, room)} of an answer"
                + (f", {wanted} were asked for" if wanted else "")
                + f": the model has {model.max_positions} positions (max_position_embeddings in its config.json)"
            )
            param = None if room < 1 else "max_tokens"
            raise Refusal(Failure(status=400, message=message, code="context_length_exceeded", param=param))
        return room if wanted is None else wanted
