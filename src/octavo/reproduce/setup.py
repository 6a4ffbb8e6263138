"""What a figure is made with: where the data lies, which model runs, the seed, how much is run. The same for every figure of a call.

Owns the search for published data files and the one study of clusters that the figures of Splitwise share, made when it is first asked
for. Runs nothing itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from octavo.costs.tables import TableError
from octavo.simulator.splitwise_study import Study, StudyData, StudyOptions
from octavo.workload.traces import TraceError

MACHINE_TABLE = "splitwise_perf_model.csv"
CONVERSATION_TRACE, CODE_TRACE = "AzureLLMInferenceTrace_conv.csv", "AzureLLMInferenceTrace_code.csv"
_SOURCES = {
    MACHINE_TABLE: "data/perf_model.csv of the public Splitwise simulator, under this name",
    CONVERSATION_TRACE: "of the Azure LLM inference traces 2023",
    CODE_TRACE: "of the Azure LLM inference traces 2023",
}


class DataMissing(ValueError):
    """A figure needs a published data file that is not there; the message names it and where it comes from."""


DATA_AT_FAULT = (DataMissing, TableError, TraceError)
"""What a figure raises whose published data file is missing or damaged; the message says which, and where."""


def _ignore(message: str) -> None:
    """Nobody wants to hear."""


@dataclass(frozen=True)
class Setup:
    """``data_dir``: the folder of published data files (None: none is there). ``model``: as ``ModelConfig.model``, of figures measured on
    the engine. ``quick``: smaller loads, for a first look. ``say``: is told what is going on, one line at a time."""

    data_dir: Path | None = None
    model: str = "smollm2"
    seed: int = 0
    quick: bool = False
    say: Callable[[str], None] = _ignore

    def data_file(self, name: str) -> Path:
        """The path of a published data file. Raises DataMissing."""
        source = f" ({_SOURCES[name]})" if name in _SOURCES else ""
        if self.data_dir is None:
            raise DataMissing(f"data: {name}{source} is needed; --data names the folder that it is in")
        path = self.data_dir / name
        if not path.is_file():
            raise DataMissing(f"data: {path}{source} is needed and is not there")
        return path

    @cached_property
    def study(self) -> Study:
        """Clusters of Splitwise; what one figure has run, others need not run again. Raises DataMissing, TableError, TraceError."""
        traces = {"conversation": self.data_file(CONVERSATION_TRACE), "code": self.data_file(CODE_TRACE)}
        options = StudyOptions.quick() if self.quick else StudyOptions()
        if self.seed:
            options = StudyOptions(options.duration_s, options.step, tuple(self.seed + seed for seed in options.seeds), options.num_splits)
        return Study(StudyData.read(self.data_file(MACHINE_TABLE), traces), options)
