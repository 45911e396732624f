"""Messages that name playbooks and `-e`, as the program `trainyard` prints them."""

from __future__ import annotations

import pytest

from trainyard.cli.wording import as_typed


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("no run a; playbooks/status.yml lists the runs", "no run a; trainyard status lists the runs"),
        ("follow it: playbooks/attach.yml -e run=tiny-73d; or", "follow it: trainyard attach tiny-73d; or"),
        ("stop it first: ansible-playbook playbooks/stop.yml -e run=a", "stop it first: trainyard stop a"),
        ("name the run: -e run=NAME, or -e all=true", "name the run: --run NAME, or --all"),
        ("playbooks/queue.yml -e do=list; then", "trainyard queue list; then"),
        ("no run x: do=list lists them", "no run x: trainyard queue list lists them"),
        ("is held: release it with do=release run=a.b", "is held: release it with trainyard queue release a.b"),
        ("do=add|list|cancel", "do=add|list|cancel"),
        ("to copy it: -e teacher_copy=true", "to copy it: --teacher-copy"),
        ("write one and set -e template=FILE", "write one and set --template FILE"),
        ("more time: -e grace=SECONDS allows it", "more time: --grace SECONDS allows it"),
        ("name it, as in -e limit=login1", "name it, as in --limit login1"),
        # A variable of a role stays a value of -e, and a file of the user keeps its name.
        ("run site.yml -e nvidia_install=true, or reboot", "run trainyard site -e nvidia_install=true, or reboot"),
        ("my/train.yml:3: not YAML", "my/train.yml:3: not YAML"),
        ("train.yml: not YAML", "train.yml: not YAML"),
        ("-e lerning_rate: unknown name", "-e lerning_rate: unknown name"),
        ("a host said --e run=x and x-e run=y", "a host said --e run=x and x-e run=y"),
    ],
)
def test_playbooks_and_extra_variables_become_commands_and_flags(text: str, shown: str) -> None:
    assert as_typed(text) == shown
