"""What a pruning run knows so far: one record per depth, in one file."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from draftwood.train.kept import damaged, read_kept, write_kept

TABLE = "prune.json"


@dataclass(frozen=True)
class Stage:
    """One depth.

    Attributes:
        depth: layers left.
        layers: which ones, by their index in the original body.
        removed: those removed last, in this order; none for the unpruned drafter.
        tau_without: τ right after the removal, before recovery.
        tau: τ after recovery.
        draft_s: seconds of one draft. Compares with those of its own depth only, since others were
            measured at other times; ``draft_passes`` compares with all.
        plain_s, verify_s: seconds of a target pass over one token and over the tree, measured in
            turn with the draft.
        speedup: estimated, over plain decoding: τ · t(1) / (t_draft + t(tree)).
        folder: of the checkpoint.
    """

    depth: int
    layers: tuple[int, ...]
    removed: tuple[int, ...]
    tau_without: float | None
    tau: float
    draft_s: float
    plain_s: float
    verify_s: float
    speedup: float
    folder: str

    @property
    def draft_passes(self) -> float:
        """What a draft costs, in plain target passes."""
        return self.draft_s / self.plain_s


@dataclass
class Table:
    """All depths so far, kept in ``prune.json`` after each."""

    settings: dict[str, Any]
    stages: list[Stage] = field(default_factory=list)

    def save(self, folder: Path) -> None:
        """Write the table; checkpoints are named as seen from ``folder``, which may move."""
        raw = asdict(self)
        for one in raw["stages"]:
            if Path(one["folder"]).is_relative_to(folder):
                one["folder"] = Path(one["folder"]).relative_to(folder).as_posix()
        raw["stages"][0]["folder"] = ""  # the drafter that the command names
        write_kept(folder / TABLE, raw)

    @staticmethod
    def load(folder: Path, drafter: str) -> Table | None:
        """What is kept in a folder, if anything.

        Args:
            drafter: folder of the unpruned drafter.

        Raises:
            ValueError: the file is damaged, or gone from a run that has begun.
        """
        file = folder / TABLE
        if not file.is_file():
            # what a depth folder keeps is continued from, for which run only the table says
            if any(one.is_dir() for one in folder.glob("depth-*")):
                raise ValueError(
                    f"{folder} has depths of a pruning run but no {TABLE}; restore it, or choose "
                    "another folder"
                )
            return None
        raw = read_kept(file)
        try:
            stages = [
                Stage(
                    **{**one, "layers": tuple(one["layers"]), "removed": _several(one["removed"])}
                )
                for one in raw.pop("stages")
            ]
            table = Table(**raw, stages=[])
        except (AttributeError, KeyError, TypeError) as error:
            raise damaged(file, repr(error)) from error
        numbers: list[Any] = []
        for index, one in enumerate(stages):
            where = str(folder / one.folder) if index else drafter
            if index and not Path(where).is_dir():
                raise ValueError(
                    f"{file} names {where}, which is gone; restore it, or choose another folder"
                )
            table.stages.append(replace(one, folder=where))
            numbers += [one.depth, one.tau, one.draft_s, one.plain_s, one.verify_s, one.speedup]
        if not all(isinstance(number, (int, float)) and number > 0 for number in numbers):
            raise damaged(file, "a number is none, or not positive")
        if not isinstance(table.settings, dict):
            raise damaged(file, "no settings")
        return table


def _several(removed: list[int] | int | None) -> tuple[int, ...]:
    """One layer a round was once written as a number, none as null."""
    if removed is None or isinstance(removed, int):
        return () if removed is None else (removed,)
    return tuple(removed)


def best_stage(table: Table, keep_tau: float = 0.0) -> Stage:
    """The fastest depth by estimate among those that keep this share of the unpruned τ."""
    enough = [one for one in table.stages if one.tau >= keep_tau * table.stages[0].tau]
    return max(enough, key=lambda one: one.speedup)
