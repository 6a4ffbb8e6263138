"""Engine configuration: frozen, nested, validated once. Command-line flags are made from it in ``cli/``; nothing mutates it."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass, field

KV_DTYPES = ("f16", "bf16", "f32", "int8")
KV_HOST_DTYPES = ("auto", "int8")
KV_RESERVATIONS = ("paged", "max", "pow2", "oracle")
PREEMPTIONS = ("auto", "recompute", "swap")
PREFIX_GRANULARITIES = ("block", "token")
SCHEDULING_POLICIES = ("fcfs", "static", "priority", "fair", "srf", "prefill_first")
SPEC_METHODS = ("auto", "ngram", "suffix", "draft", "self")
METHOD_SETTINGS = {"draft": "draft_model", "self": "self_draft_layers"}  # spec_method -> what has to be set for it
SPEC_RULES = ("coupling", "resample")
MAX_DRAFTS = 16  # draft tokens of one sequence in one step


class ConfigError(ValueError):
    """A configuration field is outside its limits; the message names field, value and limit."""


def _check(ok: bool, name: str, value: object, limit: str) -> None:
    if not ok:
        raise ConfigError(f"{name}: {value!r} is not allowed; {limit}")


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """``model`` is a catalogue name, a .gguf file, a folder with safetensors, or hf:owner/repo[:file]."""

    model: str = "smollm2"
    served_model_name: str | None = None
    max_model_len: int | None = None  # None: what the model was trained for


@dataclass(frozen=True, slots=True)
class CacheConfig:
    block_size: int = 16  # tokens
    num_kv_blocks: int | None = None
    kv_cache_memory: int | None = None  # bytes; used when num_kv_blocks is None; None: a share of free memory
    kv_cache_dtype: str = "auto"  # auto | f16 | bf16 | f32 | int8
    enable_prefix_caching: bool = True
    swap_space: int = 0  # bytes of host memory for the blocks of preempted sequences
    kv_host_memory: int | None = None  # bytes for blocks that the pool evicts; None: none, or a little on the way to kv_disk_path
    kv_disk_path: str | None = None  # folder for blocks that host memory evicts, and for a restart
    kv_disk_size: int | None = None  # bytes; None: 10 GiB
    kv_host_dtype: str = "auto"  # of blocks in kv_host_memory and kv_disk_path. auto: as in the pool | int8: half the memory, rounded
    kv_disk_flush_seconds: float | None = None  # an idle engine writes to kv_disk_path what is not there, so often; 0: never; None: 30
    kv_reservation: str = "paged"  # paged | max | pow2 | oracle: see core/reservation.py
    enable_kv_groups: bool = True  # whether layers with a window give back what has left it
    prefix_granularity: str = "block"  # block | token: whether a block that matches a prompt in part is used, by copying it

    @property
    def groups_kv(self) -> bool:
        """Whether layers with a window keep their KV in pages of their own; reserved chunks hold all layers."""
        return self.enable_kv_groups and self.kv_reservation == "paged"

    @property
    def has_kv_tiers(self) -> bool:
        return self.kv_host_memory is not None or self.kv_disk_path is not None

    def packs_kv_tiers(self, kv_dtype: str) -> bool:
        """Whether the tiers hold blocks of a cache in ``kv_dtype`` in another form than it does: then what comes back is rounded."""
        return self.has_kv_tiers and self.kv_host_dtype == "int8" and kv_dtype != "int8"


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_num_seqs: int = 64  # sequences in one step
    max_num_batched_tokens: int = 512  # token budget of one step
    max_itl_ms: float | None = None  # bound on the gaps between a stream's tokens that prompts may cause, milliseconds
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"  # one of SCHEDULING_POLICIES
    preemption: str = "auto"  # auto | recompute | swap
    admission_lookahead: int = 64  # tokens of each running sequence that admission leaves room for
    record: str | None = None  # file for every input of the scheduler, to be replayed; prompts are in it


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """What requests get that say nothing themselves (``spec``, ``spec_method``), and how the proposers that need no model are set."""

    spec: int | str = "off"  # off | auto: as many drafts as pay | K: that many wherever there are some
    spec_method: str = "auto"  # auto: the best of those that there are | ngram | suffix | draft | self
    draft_model: str | None = None  # of the same tokenizer; as ModelConfig.model
    self_draft_layers: int | None = None  # first layers of the model itself that draft
    spec_rule: str = "coupling"  # coupling: drafts change no text | resample: accept/resample, under which they keep its law
    max_drafts: int = MAX_DRAFTS  # most that "auto" takes
    ngram_min: int = 2  # tokens
    ngram_max: int = 4
    suffix_min: int | None = None  # tokens that have to match; None: 1 where "auto" chooses, 2 where a number of drafts is asked for

    @property
    def waits_to_be_asked(self) -> str | None:
        """A field that says how to draft where requests that say nothing are not drafted for; None: there is none."""
        if self.spec not in ("off", 0):
            return None
        default = SpeculativeConfig()
        names = ("draft_model", "self_draft_layers", "spec_method", "spec_rule")
        return next((name for name in names if getattr(self, name) != getattr(default, name)), None)

    def validate(self) -> None:
        """Raise ConfigError for the first field outside its limits."""
        k = self.spec
        ok = k in ("off", "auto") if isinstance(k, str) else type(k) is int and 0 <= k <= MAX_DRAFTS
        _check(ok, "spec", k, f"off, auto, or an integer from 0 to {MAX_DRAFTS}")
        _check(self.spec_method in SPEC_METHODS, "spec_method", self.spec_method, f"one of {', '.join(SPEC_METHODS)}")
        needs = METHOD_SETTINGS.get(self.spec_method)
        _check(needs is None or getattr(self, needs) is not None, "spec_method", self.spec_method, f"it needs {needs}")
        _check(self.draft_model is None or bool(self.draft_model), "draft_model", self.draft_model, "a name or a path is needed")
        layers = self.self_draft_layers
        _check(layers is None or layers >= 1, "self_draft_layers", layers, "at least 1")
        _check(self.spec_rule in SPEC_RULES, "spec_rule", self.spec_rule, f"one of {', '.join(SPEC_RULES)}")
        _check(1 <= self.max_drafts <= MAX_DRAFTS, "max_drafts", self.max_drafts, f"from 1 to {MAX_DRAFTS}")
        _check(1 <= self.ngram_min <= 32, "ngram_min", self.ngram_min, "from 1 to 32 tokens")
        _check(self.ngram_min <= self.ngram_max <= 32, "ngram_max", self.ngram_max, f"from ngram_min ({self.ngram_min}) to 32 tokens")
        _check(self.suffix_min is None or 1 <= self.suffix_min <= 64, "suffix_min", self.suffix_min, "from 1 to 64 tokens")


@dataclass(frozen=True, slots=True)
class BackendConfig:
    backend: str = "cpu"  # cpu | reference
    compute: str = "fast"  # fast | f32
    threads: int | None = None  # None: all cores this process may use


@dataclass(frozen=True, slots=True)
class EngineConfig:
    model: ModelConfig = field(default_factory=ModelConfig)
    cache: CacheConfig = field(default_factory=CacheConfig)
    scheduler: SchedulerConfig = field(default_factory=SchedulerConfig)
    backend: BackendConfig = field(default_factory=BackendConfig)
    speculative: SpeculativeConfig = field(default_factory=SpeculativeConfig)

    def validate(self) -> EngineConfig:
        """Raise ConfigError for the first field outside its limits; return self."""
        _check_model(self.model)
        _check_pool(self.cache, self.backend.backend == "cpu")
        _check_scheduler(self.scheduler)
        _check_recording(self.scheduler, self.cache.has_kv_tiers, self.speculative.draft_model is not None)
        _check_swapping(self.scheduler.preemption, self.cache)
        _check_backend(self.backend)
        self.speculative.validate()
        return self


def _check_model(m: ModelConfig) -> None:
    _check(bool(m.model), "model", m.model, "a name or a path is needed")
    named = m.served_model_name is None or bool(m.served_model_name.strip())
    _check(named, "served_model_name", m.served_model_name, "a name is needed; leave it out for the model's own")
    _check(m.max_model_len is None or m.max_model_len >= 1, "max_model_len", m.max_model_len, "at least 1")


def _check_pool(c: CacheConfig, is_on_cpu: bool) -> None:
    _check(1 <= c.block_size <= 1024, "block_size", c.block_size, "from 1 to 1024 tokens")
    if is_on_cpu:
        _check(c.block_size % 16 == 0, "block_size", c.block_size, "a multiple of 16 on the cpu backend")
    _check(c.num_kv_blocks is None or c.num_kv_blocks >= 1, "num_kv_blocks", c.num_kv_blocks, "at least 1")
    both = c.num_kv_blocks is not None and c.kv_cache_memory is not None
    _check(not both, "kv_cache_memory", c.kv_cache_memory, "give either num_kv_blocks or kv_cache_memory")
    _check(c.kv_cache_memory is None or c.kv_cache_memory >= 1, "kv_cache_memory", c.kv_cache_memory, "at least 1 byte")
    _check(c.kv_cache_dtype in ("auto", *KV_DTYPES), "kv_cache_dtype", c.kv_cache_dtype, f"one of auto, {', '.join(KV_DTYPES)}")
    _check_tiers(c)
    check_reservation(c)
    grain = c.prefix_granularity
    _check(grain in PREFIX_GRANULARITIES, "prefix_granularity", grain, f"one of {', '.join(PREFIX_GRANULARITIES)}")
    _check(grain == "block" or c.enable_prefix_caching, "prefix_granularity", grain, "there is no prefix cache to share tokens of")


def _check_scheduler(s: SchedulerConfig) -> None:
    _check(1 <= s.max_num_seqs <= 4096, "max_num_seqs", s.max_num_seqs, "from 1 to 4096")
    _check(1 <= s.max_num_batched_tokens <= 1 << 20, "max_num_batched_tokens", s.max_num_batched_tokens, "from 1 to 1048576")
    budget = s.max_num_batched_tokens
    _check(budget >= s.max_num_seqs, "max_num_batched_tokens", budget, f"at least max_num_seqs ({s.max_num_seqs})")
    itl = s.max_itl_ms
    _check(itl is None or 0 < itl < math.inf, "max_itl_ms", itl, "a finite number of milliseconds above 0; leave it out for no bound")
    _check(itl is None or s.enable_chunked_prefill, "max_itl_ms", itl, "it sizes pieces of prompts, and enable_chunked_prefill is off")
    policy = s.scheduling_policy
    _check(policy in SCHEDULING_POLICIES, "scheduling_policy", policy, f"one of {', '.join(SCHEDULING_POLICIES)}")
    stalls = itl is not None and policy == "prefill_first"
    _check(not stalls, "max_itl_ms", itl, "it bounds gaps of running answers, which scheduling_policy prefill_first lets stand still")
    _check(s.preemption in PREEMPTIONS, "preemption", s.preemption, f"one of {', '.join(PREEMPTIONS)}")
    lookahead = s.admission_lookahead
    _check(1 <= lookahead <= 1 << 20, "admission_lookahead", lookahead, "from 1 to 1048576 tokens")


def _check_recording(s: SchedulerConfig, has_tiers: bool, borrows_pages: bool) -> None:
    _check(s.record is None or bool(s.record.strip()), "record", s.record, "a file is needed")
    _check(s.record is None or not has_tiers, "record", s.record, "KV tiers go by their threads, which no recording tells")
    shares = s.record is not None and borrows_pages
    _check(not shares, "record", s.record, "a draft model borrows pages of the KV pool, which no recording tells")


def _check_swapping(preemption: str, c: CacheConfig) -> None:
    _check(c.swap_space >= 0, "swap_space", c.swap_space, "at least 0 bytes")
    _check(preemption != "swap" or c.swap_space > 0, "preemption", preemption, "it needs swap_space, the bytes to swap to")
    _check(preemption != "recompute" or c.swap_space == 0, "swap_space", c.swap_space, "0 with preemption recompute, which uses none")
    _check(c.kv_reservation == "paged" or c.swap_space == 0, "swap_space", c.swap_space, "0 with kv_reservation: nobody is preempted")


def _check_backend(b: BackendConfig) -> None:
    _check(b.backend in ("cpu", "reference"), "backend", b.backend, "one of cpu, reference")
    _check(b.compute in ("fast", "f32"), "compute", b.compute, "one of fast, f32")
    _check(b.threads is None or 1 <= b.threads <= 1024, "threads", b.threads, "from 1 to 1024")


def _check_tiers(c: CacheConfig) -> None:
    _check(c.kv_host_memory is None or c.kv_host_memory >= 1, "kv_host_memory", c.kv_host_memory, "at least 1 byte")
    _check(c.kv_disk_path is None or bool(c.kv_disk_path.strip()), "kv_disk_path", c.kv_disk_path, "a folder is needed")
    _check(c.kv_disk_size is None or c.kv_disk_size >= 1, "kv_disk_size", c.kv_disk_size, "at least 1 byte")
    limits_nothing = c.kv_disk_size is not None and c.kv_disk_path is None
    _check(not limits_nothing, "kv_disk_size", c.kv_disk_size, "it limits kv_disk_path, which is not set")
    _check(c.kv_host_dtype in KV_HOST_DTYPES, "kv_host_dtype", c.kv_host_dtype, f"one of {', '.join(KV_HOST_DTYPES)}")
    packs = c.kv_host_dtype == "auto" or c.has_kv_tiers
    _check(packs, "kv_host_dtype", c.kv_host_dtype, "it is for kv_host_memory and kv_disk_path, and neither is set")
    flush_s = c.kv_disk_flush_seconds
    _check(flush_s is None or 0 <= flush_s < math.inf, "kv_disk_flush_seconds", flush_s, "a finite number of seconds, at least 0")
    flushes = flush_s is None or c.kv_disk_path is not None
    _check(flushes, "kv_disk_flush_seconds", flush_s, "it is for kv_disk_path, which is not set")
    for name, value in (("kv_host_memory", c.kv_host_memory), ("kv_disk_path", c.kv_disk_path)):
        kept = c.enable_prefix_caching or value is None
        _check(kept, name, value, "it keeps blocks of the prefix cache, and enable_prefix_caching is off")


def check_reservation(c: CacheConfig) -> None:
    """Raise ConfigError when ``kv_reservation`` is none, or goes with a prefix cache."""
    _check(c.kv_reservation in KV_RESERVATIONS, "kv_reservation", c.kv_reservation, f"one of {', '.join(KV_RESERVATIONS)}")
    shares = c.enable_prefix_caching and c.kv_reservation != "paged"
    _check(not shares, "kv_reservation", c.kv_reservation, "reserved blocks are never shared: turn enable_prefix_caching off")


def octavo_home() -> str:
    """Folder of downloaded models: $OCTAVO_HOME, else ~/.cache/octavo."""
    return os.environ.get("OCTAVO_HOME") or os.path.join(os.path.expanduser("~"), ".cache", "octavo")
