"""Answers survive kills of the teachers and of the controller: real processes, real sockets, real files."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import pytest
from fake_teacher import DIGEST, Teacher, start, stop, text_of
from run_hosts import TOP, free_port

from trainer.errors import UserError
from trainyard.ollama.answers import AnswerFile

PROMPTS = 500
KILLS = 20
NODES = 3
CONTROLLER = """
import json, sys
from pathlib import Path
from trainyard.ollama.answers import AnswerFile
from trainyard.ollama.client import OllamaClient
from trainyard.ollama.collect import Questions, collect_answers
from trainyard.ollama.distill_options import DistillOptions
from trainyard.ollama.prompts import read_prompts
from trainyard.ollama.pool import OllamaNode
urls, prompts, path, digest = json.loads(sys.argv[1])
nodes = [OllamaNode(f"node{n}", OllamaClient(url), "teacher:latest", digest) for n, url in enumerate(urls)]
options = DistillOptions(teacher="teacher", prompts=prompts)
with AnswerFile(Path(path)) as answers:
    collect_answers(Questions(read_prompts(Path(prompts)), options), nodes, answers, print)
"""


@pytest.mark.slow
def test_twenty_random_kills(tmp_path: Path) -> None:
    """No answer is lost or doubled, and only prompts in flight are sent twice."""
    draw = random.Random(16)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"prompt": f"question {n}"}) + "\n" for n in range(PROMPTS)))
    logs = [tmp_path / f"asked{n}.txt" for n in range(NODES)]
    teachers = [Teacher(f"127.0.0.{n + 2}", free_port(), 2, 0.1, log=str(logs[n])) for n in range(NODES)]
    path = tmp_path / "answers.jsonl"
    argument = json.dumps([[teacher.url for teacher in teachers], str(prompts), str(path), DIGEST])

    def controller() -> subprocess.Popen[str]:
        return subprocess.Popen([sys.executable, "-c", CONTROLLER, argument], cwd=TOP, text=True)

    nodes = [start(teacher) for teacher in teachers]
    running = controller()
    of_controller = 0
    try:
        for kill in range(KILLS):
            time.sleep(draw.uniform(0.1, 0.4))
            assert running.poll() is None  # every kill hits a pool at work
            if kill % 4 == 3:
                running.kill()
                running.wait()
                of_controller += 1
                running = controller()
            else:
                victim = draw.randrange(NODES)
                stop(nodes[victim])
                nodes[victim] = start(teachers[victim])
        assert running.wait(60) == 0
    finally:
        running.kill()
        running.wait()
        for node in nodes:
            stop(node)
    records = [json.loads(line) for line in path.read_text().splitlines()]
    assert Counter(r["messages"][0]["content"] for r in records) == Counter(f"question {n}" for n in range(PROMPTS))
    assert all(record["text"] == text_of(record) for record in records)
    answered = Counter(line for log in logs for line in log.read_text().splitlines())
    # Only requests of a killed controller are answered again: at most some requests of each node.
    assert sum(answered.values()) - PROMPTS <= of_controller * NODES * 8
    assert len(answered) == PROMPTS


def test_a_cut_line_is_removed_and_a_second_controller_refused(tmp_path: Path) -> None:
    path = tmp_path / "answers.jsonl"
    line = json.dumps({"key": "k", "digest": "d", "messages": [], "text": "whole", "finished": "stop"})
    path.write_text(f"{line}\n{line[:30]}")
    with AnswerFile(path) as answers:
        assert (len(answers), answers.repaired, "k" in answers) == (1, 30, True)
        assert path.read_text() == line + "\n"
        with pytest.raises(UserError, match="another controller collects answers"):
            AnswerFile(path)
    code = f"from pathlib import Path; from trainyard.ollama.answers import AnswerFile; f = AnswerFile(Path({str(path)!r})); print('open', flush=True); input()"
    other = subprocess.Popen([sys.executable, "-c", code], cwd=TOP, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    assert other.stdout
    assert other.stdout.readline() == b"open\n"
    with pytest.raises(UserError, match="another controller"):
        AnswerFile(path)
    other.send_signal(signal.SIGKILL)
    other.communicate()
    AnswerFile(path).__exit__(None, None, None)  # the lock ended with its process
