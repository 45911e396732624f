"""Let an Ollama model teach several students of one base, and merge them.

python examples/distributed/teacher_student.py --teacher llama3:8b --prompts prompts.jsonl --model smollm2 [--inventory FILE]
"""

import argparse

from trainyard import Cluster


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    for name in ("teacher", "prompts", "model"):
        parser.add_argument(f"--{name}", required=True)
    parser.add_argument("--inventory")
    parser.add_argument("--max-steps", type=int, default=0)
    given = parser.parse_args()
    cluster = Cluster(given.inventory) if given.inventory else Cluster.local()

    answers = cluster.teach(given.teacher, given.prompts, near_duplicates=0)
    print(f"{answers.count} answers of {answers.teacher}: {answers.dataset}")
    students = cluster.students(
        answers, model=given.model, count=2, student_data="bootstrap", seq_length=128, max_steps=given.max_steps
    )
    for student in students:
        result = student.result
        assert result
        print(f"{student.name}: {result.eval_loss_first:.3f} -> {result.eval_loss:.3f}, {result.train_samples} samples")
    merged = cluster.merge(students, run=f"{students[0].name}-merged", method="soup")
    print(f"{merged.name}: {merged.base_loss:.3f} -> {merged.eval_loss:.3f}: {merged.path}")


if __name__ == "__main__":
    main()
