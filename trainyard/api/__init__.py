"""The Python interface: a cluster with its hosts, runs, students and queue. See docs/your-code.md.

    from trainyard import Cluster
    run = Cluster.local().train(model="tiny", max_steps=10)
    print(run.wait().eval_loss)

It is a front end of the table of commands, as the program and the playbooks are: a method takes the options of its command by their
names, and raises the same errors, whose class is TrainyardError.
"""

from trainer.common.errors import TrainyardError
from trainyard.api.cluster import Cluster
from trainyard.api.results import (
    Answers,
    Deployed,
    Evaluation,
    Event,
    Gpu,
    HostInfo,
    Job,
    Machine,
    Machines,
    Merged,
    Metric,
    OllamaModel,
    RunResult,
    SubjectChange,
    SubjectScore,
)
from trainyard.api.run import Run

__all__ = [
    "Answers",
    "Cluster",
    "Deployed",
    "Evaluation",
    "Event",
    "Gpu",
    "HostInfo",
    "Job",
    "Machine",
    "Machines",
    "Merged",
    "Metric",
    "OllamaModel",
    "Run",
    "RunResult",
    "SubjectChange",
    "SubjectScore",
    "TrainyardError",
]
