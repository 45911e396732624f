"""Draw the loss of a run as an SVG image for the README: ``draw_run.py RUN_DIR > docs/first-run.svg``."""

import json
import sys
from pathlib import Path

WIDTH, HEIGHT, LEFT, BOTTOM = 640, 240, 50, 40


def main(run_dir: Path) -> str:
    """Return an SVG image of the loss by step.

    Args:
        run_dir: the run folder, with metrics.jsonl and result.json.
    """
    rows = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    result = json.loads((run_dir / "result.json").read_text(encoding="utf-8"))
    losses = [row["loss"] for row in rows]
    low, high = int(min(losses)), int(max(losses)) + 1

    def point(step: float, loss: float) -> tuple[float, float]:
        x = LEFT + (WIDTH - LEFT - 20) * (step - 1) / max(1, len(rows) - 1)
        return x, HEIGHT - BOTTOM - (HEIGHT - BOTTOM - 30) * (loss - low) / (high - low)

    line = " ".join(f"{x:.1f},{y:.1f}" for x, y in (point(row["step"], row["loss"]) for row in rows))
    grid = []
    for loss in range(low, high + 1):
        y = point(1, loss)[1]
        grid.append(f'<line x1="{LEFT}" x2="{WIDTH - 20}" y1="{y:.1f}" y2="{y:.1f}" stroke="#ddd"/>')
        grid.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{loss}</text>')
    for step in range(0, len(rows) + 1, 10):
        x = point(max(1, step), low)[0]
        grid.append(f'<text x="{x:.1f}" y="{HEIGHT - 20}" text-anchor="middle">{max(1, step)}</text>')
    title = f"Loss by step, {result['world_size']} ranks: {losses[0]:.2f} to {losses[-1]:.2f}"
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
            f'<text x="{LEFT}" y="18" font-size="13">{title}</text>',
            *grid,
            f'<polyline points="{line}" fill="none" stroke="#1f6feb" stroke-width="2"/>',
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    print(main(Path(sys.argv[1])), end="")
