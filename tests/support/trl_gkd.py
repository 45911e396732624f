"""Write the losses of trl's GKD for small logits, for a comparison where trl is not installed.

    TRL_EXPERIMENTAL_SILENCE=1 python tests/support/trl_gkd.py > tests/unit/trainer/trl_gkd.json

The packages of the extra `bench` have trl.
"""

from __future__ import annotations

import importlib.metadata
import json
from typing import Any

BETAS = (0.0, 0.1, 0.5, 0.9, 1.0)
TEMPERATURES = (0.5, 1.0, 2.0)
SHAPE = (2, 5, 7)  # rows, tokens, vocabulary


def small_logits() -> tuple[Any, Any, Any]:
    """Return logits of student and teacher, and labels of which some are ignored."""
    import torch

    generator = torch.Generator().manual_seed(5)
    student, teacher = (torch.randn(SHAPE, generator=generator).mul(3).round(decimals=3) for _ in range(2))
    labels = torch.randint(0, SHAPE[-1], SHAPE[:2], generator=generator)
    labels[0, :2] = labels[1, 4] = -100
    return student, teacher, labels


def trl_loss(student: Any, teacher: Any, labels: Any, beta: float, temperature: float) -> Any:
    """Return the divergence summed over the tokens with a label, as trl computes it."""
    from trl.experimental.gkd import GKDTrainer

    return GKDTrainer.generalized_jsd_loss(
        student, teacher, labels=labels, beta=beta, temperature=temperature, reduction="sum"
    )


def main() -> None:
    """Print the values as JSON."""
    student, teacher, labels = small_logits()
    student.requires_grad_()
    cases = []
    for beta in BETAS:
        for temperature in TEMPERATURES:
            student.grad = None
            loss = trl_loss(student, teacher, labels, beta, temperature)
            loss.backward()
            gradient = [[round(value, 7) for value in row] for row in student.grad.flatten(0, 1).tolist()]
            cases.append({"beta": beta, "temperature": temperature, "loss": float(loss.detach()), "gradient": gradient})
    values = {"student": student.detach().tolist(), "teacher": teacher.tolist(), "labels": labels.tolist()}
    print(json.dumps({"trl": importlib.metadata.version("trl"), **values, "cases": cases}))


if __name__ == "__main__":
    main()
