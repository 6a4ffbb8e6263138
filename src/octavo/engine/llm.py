"""The Python API: generate, chat and stream from the caller's own thread.

    with LLM("smollm2") as llm:
        print(llm.generate("The capital of France is")[0].outputs[0].text)

Owns an Engine and drives it while a call waits; there is no background thread. Calls from several threads are batched together:
whoever waits makes the next step for all.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from octavo.config import BackendConfig, CacheConfig, EngineConfig, ModelConfig, SchedulerConfig, SpeculativeConfig
from octavo.core.request import ParameterError, SamplingParams
from octavo.core.speculative_params import SpeculativeParams
from octavo.engine.engine import Engine
from octavo.engine.interrupts import interrupts_deferred
from octavo.engine.outputs import GenerationError, OutputEvent, RequestOutput
from octavo.engine.progress import ProgressBar

if TYPE_CHECKING:
    from octavo.backends.base import Backend
    from octavo.models.loaded import LoadedModel

Prompt = str | Sequence[int] | Mapping[str, Any]  # text, token ids, {"prompt": text} or {"prompt_token_ids": ids}
Message = Mapping[str, Any]
_SECTIONS: dict[str, type] = {
    "model": ModelConfig,
    "cache": CacheConfig,
    "scheduler": SchedulerConfig,
    "backend": BackendConfig,
    "speculative": SpeculativeConfig,
}

_NOT_OPTIONS = {
    "model": "it is the first argument",
    "served_model_name": "it names a model to clients of `octavo serve`, which this is not",
}
_PROMPT_KEYS = {"prompt", "prompt_token_ids", "cache_salt", "speculative", "priority", "user"}


def make_config(model: str, **options: Any) -> EngineConfig:
    """EngineConfig from flat names, as on the command line with underscores. Raises TypeError for a name that is no option here."""
    fields: dict[str, dict[str, Any]] = {section: {} for section in _SECTIONS}
    fields["model"]["model"] = model
    sections = {f: section for section, cls in _SECTIONS.items() for f in cls.__dataclass_fields__ if f not in _NOT_OPTIONS}  # type: ignore[attr-defined]
    for name, value in options.items():
        if name not in sections:
            reason = _NOT_OPTIONS.get(name, "it is no engine option")
            raise TypeError(f"{name}: {reason}; there are: {', '.join(sorted(sections))}")
        fields[sections[name]][name] = value
    return EngineConfig(**{section: cls(**fields[section]) for section, cls in _SECTIONS.items()}).validate()


class LLM:
    """A model ready to answer. ``options`` are the fields of EngineConfig's sections, e.g. ``max_num_seqs=16, compute="f32"``."""

    def __init__(self, model: str = "smollm2", **options: Any) -> None:
        """Open ``model`` (a catalogue name, a .gguf file, a folder, hf:owner/repo). Raises ConfigError, ModelFileError, BackendError."""
        self._start(Engine.load(make_config(model, **options)))

    @classmethod
    def from_engine(cls, engine: Engine) -> LLM:
        """Drive an engine that is already there; ``close`` closes it."""
        self = cls.__new__(cls)
        self._start(engine)
        return self

    @classmethod
    def from_loaded(cls, model: LoadedModel, config: EngineConfig, backend: Backend | None = None) -> LLM:
        """From a model that is already open, on a backend of its own unless one is given."""
        return cls.from_engine(Engine.from_loaded(model, config) if backend is None else Engine(model, config, backend))

    def _start(self, engine: Engine) -> None:
        self.engine = engine
        self.tokenizer = engine.model.tokenizer
        self._lock = threading.Lock()  # held for one step, or to add and abort
        self._inboxes: dict[str, list[OutputEvent]] = {}

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Release threads and memory. Idempotent."""
        self.engine.close()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        use_progress_bar: bool | None = None,
    ) -> list[RequestOutput]:
        """Complete one prompt or many (batched by the scheduler); outputs are in the order of the prompts.

        A prompt is text, token ids, or a dict with ``prompt`` or ``prompt_token_ids`` and perhaps ``cache_salt``, ``speculative``
        (SpeculativeParams, or a dict of its fields), ``priority`` and ``user`` (which the policies priority and fair go by). One
        SamplingParams serves all prompts, or give one each; without ``max_tokens`` an output may fill the context. A progress bar on
        stderr shows for more than one prompt on a terminal; ``use_progress_bar`` overrides.
        Raises ParameterError before anything runs. A prompt that the engine cannot finish stops no other; when all have ended,
        GenerationError is raised, whose ``outputs`` are what would have been returned.
        """
        batch = _as_batch(prompts)
        return self._run([self._prompt(p) for p in batch], _params_for(sampling_params, len(batch)), use_progress_bar)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        use_progress_bar: bool | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation or many, through the model's chat template. Raises TemplateError for what the template refuses."""
        conversations: list[Sequence[Message]] = [messages] if not messages or isinstance(messages[0], Mapping) else list(messages)  # type: ignore[list-item, arg-type]
        prompts = [self.render_chat(c, add_generation_prompt, continue_final_message) for c in conversations]
        return self._run(prompts, _params_for(sampling_params, len(prompts)), use_progress_bar)

    def stream(self, prompt: Prompt, sampling_params: SamplingParams | None = None) -> Generator[OutputEvent]:
        """Events of one prompt as steps make them: ``text`` and ``token_ids`` are what is new. Closing the iterator aborts the request."""
        return self._stream(self._prompt(prompt), sampling_params or SamplingParams())

    def stream_chat(self, messages: Sequence[Message], sampling_params: SamplingParams | None = None) -> Generator[OutputEvent]:
        """As ``stream``, for a conversation."""
        return self._stream(self.render_chat(messages), sampling_params or SamplingParams())

    def render_chat(
        self, messages: Sequence[Message], add_generation_prompt: bool | None = None, continue_final_message: bool = False
    ) -> dict[str, Any]:
        """The conversation as a prompt: its text by the chat template, and its token ids (the template writes all special tokens)."""
        template = self.engine.model.chat_template
        if template is None:
            raise ParameterError("messages", f"{len(messages)} messages", f"model {self.engine.model.name!r} has no chat template")
        text = template.render([dict(m) for m in messages], add_generation_prompt, continue_final_message)
        return {"prompt": text, "prompt_token_ids": self.tokenizer.encode(text, add_special_tokens=False)}

    def _prompt(self, prompt: Prompt) -> dict[str, Any]:
        if isinstance(prompt, str):
            return {"prompt": prompt, "prompt_token_ids": self.tokenizer.encode(prompt)}
        if isinstance(prompt, Mapping):
            if unknown := prompt.keys() - _PROMPT_KEYS:
                raise ParameterError("prompt", sorted(map(str, unknown)), f"a dict has {', '.join(sorted(_PROMPT_KEYS))} and nothing else")
            if "prompt_token_ids" in prompt:
                return dict(prompt)
            if "prompt" in prompt:
                return {**prompt, **self._prompt(prompt["prompt"])}
            raise ParameterError("prompt", sorted(prompt), "a dict needs prompt or prompt_token_ids")
        return {"prompt": None, "prompt_token_ids": list(prompt)}

    def _submit(
        self, prompt: dict[str, Any], params: SamplingParams, inbox: list[OutputEvent], outputs: dict[str, RequestOutput]
    ) -> RequestOutput:
        """Queue a prompt whose events shall go to ``inbox``. It is in ``outputs`` before, so that an interrupt leaves none behind."""
        engine = self.engine
        speculative = SpeculativeParams.of(prompt.get("speculative"))
        options = {name: prompt[name] for name in ("cache_salt", "priority", "user") if prompt.get(name) is not None}
        prepared = engine.prepare(prompt["prompt_token_ids"], params, speculative=speculative, **options)
        request_id = prepared.request.request_id
        output = outputs[request_id] = RequestOutput.start(prepared.request, prompt.get("prompt"), prepared.warnings)
        with self._lock, interrupts_deferred():
            engine.add(prepared)
            self._inboxes[request_id] = inbox
        return output

    def _take(self, inbox: list[OutputEvent]) -> list[OutputEvent]:
        """New events of an inbox; runs one step when there are none."""
        with self._lock:
            if not inbox:
                with interrupts_deferred():
                    for event in self.engine.step():
                        if event.request_id in self._inboxes:
                            self._inboxes[event.request_id].append(event)
            events = inbox[:]
            inbox.clear()
        return events

    def _drop(self, outputs: Iterable[RequestOutput]) -> None:
        """Forget requests; those that have not finished are aborted."""
        with interrupts_deferred(), self._lock:
            for output in outputs:
                if self._inboxes.pop(output.request_id, None) is not None and not output.finished:
                    self.engine.abort(output.request_id)

    def _run(
        self, prompts: Sequence[dict[str, Any]], params: Sequence[SamplingParams], use_progress_bar: bool | None
    ) -> list[RequestOutput]:
        outputs: dict[str, RequestOutput] = {}
        inbox: list[OutputEvent] = []
        show = use_progress_bar if use_progress_bar is not None else len(prompts) > 1 and sys.stderr.isatty()
        try:
            for prompt, one_params in zip(prompts, params, strict=True):
                self._submit(prompt, one_params, inbox, outputs)
            bar = ProgressBar(len(outputs)) if show else None
            num_done = 0
            while num_done < len(outputs):
                events = self._take(inbox)
                for event in events:
                    output = outputs[event.request_id]
                    output.apply(event)
                    num_done += event.finish_reason is not None and output.finished
                if bar is not None:
                    bar.update(num_done, sum(len(event.token_ids) for event in events))
        finally:
            self._drop(outputs.values())
        failed = next((output for output in outputs.values() if output.error is not None), None)
        if failed is not None:
            raise GenerationError(str(failed.error), failed.error_code, list(outputs.values()))
        return list(outputs.values())

    def _stream(self, prompt: dict[str, Any], params: SamplingParams) -> Generator[OutputEvent]:
        inbox: list[OutputEvent] = []
        outputs: dict[str, RequestOutput] = {}
        try:
            output = self._submit(prompt, params, inbox, outputs)
            while not output.finished:
                for event in self._take(inbox):
                    output.apply(event)
                    if event.error is not None:
                        raise GenerationError(event.error, event.error_code, [output])
                    yield event
        finally:
            self._drop(outputs.values())


def _as_batch(prompts: Prompt | Sequence[Prompt]) -> list[Prompt]:
    """One prompt as a batch of one: text, a dict, or a list that begins with a number."""
    if isinstance(prompts, (str, Mapping)) or (len(prompts) > 0 and isinstance(prompts[0], int)):
        return [prompts]  # type: ignore[list-item]
    return list(prompts)  # type: ignore[arg-type]


def _params_for(sampling_params: SamplingParams | Sequence[SamplingParams] | None, num_prompts: int) -> list[SamplingParams]:
    if sampling_params is None or isinstance(sampling_params, SamplingParams):
        return [sampling_params or SamplingParams()] * num_prompts
    if len(sampling_params) != num_prompts:
        raise ParameterError("sampling_params", len(sampling_params), f"one, or as many as there are prompts ({num_prompts})")
    return list(sampling_params)
