"""Metric loggers of rank 0: TensorBoard, wandb, trackio and MLflow, behind one interface."""

import importlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

from trainer.common.errors import UserError
from trainer.common.packages import how_to_install
from trainer.config import RunSpec


def project() -> str:
    """Return the project of wandb and trackio, which is the experiment of MLflow: WANDB_PROJECT, which `run_env` sets."""
    return os.environ.get("WANDB_PROJECT") or "trainyard"


class Logger(Protocol):
    def log(self, values: dict[str, float], step: int) -> None: ...

    def flush(self) -> None: ...

    def close(self) -> None: ...


def open_loggers(spec: RunSpec, run_dir: Path, first: bool, purge_step: int | None) -> list[Logger]:
    """Return the loggers of the spec. A restarted run continues its record.

    `first`: whether this is the first rank of the run: several heads of DiLoCo share the record of a service.
    `purge_step`: the first step of which TensorBoard forgets what was recorded before; None for no step. Raises
    UserError: a logger is not installed.
    """
    loggers: list[Logger] = [_TensorBoard(run_dir, purge_step)] if "tensorboard" in spec.loggers else []
    services: dict[str, Callable[[RunSpec, Path], Logger]] = {"wandb": _wandb, "trackio": _trackio, "mlflow": _Mlflow}
    return loggers + [services[name](spec, run_dir) for name in spec.loggers if first and name in services]


class _TensorBoard:
    def __init__(self, run_dir: Path, purge_step: int | None) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run_dir / "tensorboard"), purge_step=purge_step)

    def log(self, values: dict[str, float], step: int) -> None:
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def flush(self) -> None:
        self._writer.flush()

    def close(self) -> None:
        self._writer.close()


class _Service:
    """wandb, or a package with its interface."""

    def __init__(self, package: str, spec: RunSpec, **more: Any) -> None:
        names = {"project": project(), "name": spec.run, "resume": "allow"}
        self._run = _package(package).init(**names, **more, config=spec.values())

    def log(self, values: dict[str, float], step: int) -> None:
        self._run.log(values, step=step)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._run.finish()


def _wandb(spec: RunSpec, run_dir: Path) -> Logger:
    return _Service("wandb", spec, id=spec.run, dir=str(run_dir))


def _trackio(spec: RunSpec, run_dir: Path) -> Logger:
    os.environ.setdefault("TRACKIO_DIR", str(run_dir / "trackio"))
    return _Service("trackio", spec, embed=False)


class _Mlflow:
    def __init__(self, spec: RunSpec, run_dir: Path) -> None:
        if "MLFLOW_TRACKING_URI" not in os.environ:  # a database would need more packages
            os.environ |= {"MLFLOW_TRACKING_URI": f"file:{run_dir}/mlflow", "MLFLOW_ALLOW_FILE_STORE": "true"}
        self._mlflow = mlflow = _package("mlflow")
        experiment = mlflow.set_experiment(project()).experiment_id
        named = f"attributes.run_name = '{spec.run}'"
        before = mlflow.MlflowClient().search_runs([experiment], named, max_results=1)
        mlflow.start_run(run_id=before[0].info.run_id if before else None, run_name=spec.run)
        if not before:
            mlflow.log_params(spec.model_dump(mode="json", exclude_defaults=True, exclude={"automatic"}))

    def log(self, values: dict[str, float], step: int) -> None:
        self._mlflow.log_metrics(values, step=step)

    def flush(self) -> None: ...

    def close(self) -> None:
        self._mlflow.end_run()


def _package(name: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise UserError(
            f"loggers: {name} is not installed on this host ({error}): {how_to_install('mlflow-skinny' if name == 'mlflow' else name, name)}; or set loggers=tensorboard"
        ) from None
