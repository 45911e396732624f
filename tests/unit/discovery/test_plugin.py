"""The inventory plugin with ansible-inventory and ansible-playbook, in network namespaces."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
import yaml
from fake_ollama import Server, model, serve
from run_hosts import TOP
from tables import table
from test_ssh import sshd

BIN = Path(sys.executable).parent
PROGRAM = "{{ lookup('pipe', 'id') }}"
GROUPS = {"discovered", "cluster", "head", "workers", "untrusted"}


class Inventory:
    """Runs ansible commands, in a namespace or here, on inventory files in `folder`."""

    def __init__(self, folder: Path, environment: dict[str, str], namespace: str | None = None) -> None:
        self.folder = folder
        self.environment = environment
        self.prefix = ["ip", "netns", "exec", namespace] if namespace else []
        self.sources: list[str] = []
        self.server: Callable[..., Server]  # of the fixture `net`
        self.sshd: Callable[[int], AbstractContextManager[None]]

    def source(self, name: str, content: dict) -> None:
        (self.folder / name).write_text(yaml.safe_dump(content, sort_keys=False))
        self.sources += ["-i", str(self.folder / name)]

    def run(self, command: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*self.prefix, str(BIN / command), *self.sources, *arguments],
            cwd=TOP,
            env=self.environment,
            capture_output=True,
            text=True,
            timeout=60,
        )

    def graph(self) -> subprocess.CompletedProcess[str]:
        return self.run("ansible-inventory", "--graph")

    def list(self, *arguments: str) -> dict:
        done = self.run("ansible-inventory", "--list", *arguments)
        assert done.returncode == 0, done.stderr
        return plain(json.loads(done.stdout))


def plain(value):
    """Remove the mark that ansible-inventory puts on text that is not a template."""
    if isinstance(value, dict):
        return (
            value["__ansible_unsafe"] if set(value) == {"__ansible_unsafe"} else {k: plain(v) for k, v in value.items()}
        )
    return [plain(v) for v in value] if isinstance(value, list) else value


@pytest.fixture
def here(tmp_path, environment):
    return Inventory(tmp_path, environment)


@pytest.fixture
def net(lab, tmp_path, environment):
    """10.50.0.0/28: the controller at .1, machines at .2, .9 and .10."""
    lab.controller("10.50.0.1/28")
    for i in (2, 9, 10):
        lab.node(f"n{i}", f"10.50.0.{i}/28")
    lab.wait_for_links()
    inventory = Inventory(tmp_path, environment, lab.control)
    inventory.server = lambda i, **more: Server(f"10.50.0.{i}", namespace=f"{lab.tag}-n{i}", **more)
    inventory.sshd = lambda i: sshd(tmp_path, f"key{i}", f"10.50.0.{i}", 22, f"{lab.tag}-n{i}")
    return inventory


def accept(net: Inventory, i: int) -> None:
    key = (net.folder / f"key{i}.pub").read_text().split()[:2]
    with (net.folder / ".ssh" / "known_hosts").open("a") as file:
        file.write(f"10.50.0.{i} {' '.join(key)}\n")


def until_ssh_is_up(net: Inventory, *machines: int | str) -> None:
    for i in machines:
        address = i if isinstance(i, str) else f"10.50.0.{i}"
        command = [*net.prefix, "ssh-keyscan", "-T", "5", address]
        for _ in range(100):
            if subprocess.run(command, capture_output=True).stdout:
                break


@pytest.mark.lab
def test_an_empty_network_reports_the_scan_and_advice(net):
    net.source("ollama.yml", {"plugin": "ollama"})
    done = net.graph()
    assert done.returncode == 0
    assert set(re.findall(r"@(\w+):", done.stdout)) == GROUPS | {"all", "ungrouped"}
    assert re.search(r"scanned 10\.50\.0\.0/28 \(15 addresses, port 11434\) in 0\.\d\d s: 0 machines", done.stderr)
    assert "3 ports refused the connection, so machines exist there" in done.stderr
    assert "OLLAMA_HOST=0.0.0.0" in done.stderr and "passes: 2" in done.stderr
    assert "0 machines found: there is no machine to train on" in done.stderr
    assert net.list()["_meta"]["hostvars"] == {}


@pytest.mark.lab
def test_known_and_unknown_machines(net):
    # Without a prefix, the name of a model is the name of a group: an untrusted machine could join any group.
    keyed = [{"key": "discovered_models | map(attribute='name') | list", "prefix": "", "separator": ""}]
    options = {"compose": {"first": "discovered_models[0].name"}, "groups": {"every": "true"}, "keyed_groups": keyed}
    net.source("ollama.yml", {"plugin": "ollama", "answer_timeout": 20.0, **options})
    qwen = model("qwen2.5:0.5b")
    servers = [
        net.server(2, models=[model("cluster"), qwen]),
        net.server(9, models=[qwen, model("llama3.2:1b", "llama")], loaded=[{"name": "llama3.2:1b", "size_vram": 5}]),
        net.server(10, models=[model("phi3", "phi3")]),
        Server("127.0.0.1", namespace=net.prefix[-1]),
    ]
    with serve(servers), net.sshd(2), net.sshd(9), net.sshd(10):
        until_ssh_is_up(net, 2, 9, 10)
        accept(net, 9)
        accept(net, 10)
        done = net.graph()
        listed = net.list()
        # The command that the inventory prints accepts the key.
        command = listed["_meta"]["hostvars"]["10.50.0.2"]["discovered_accept"]
        assert f"accept it: {command}" in done.stderr
        subprocess.run(["sh", "-c", command], env=net.environment, check=True)
        afterwards = net.list()
    variables = listed["_meta"]["hostvars"]
    # This machine answers only at 127.0.0.1; other machines reach it at its address on the network.
    assert listed["head"]["hosts"] == ["10.50.0.1"]
    assert listed["workers"]["hosts"] == ["10.50.0.9", "10.50.0.10"]
    assert listed["untrusted"]["hosts"] == ["10.50.0.2"]
    assert listed["discovered"]["hosts"] == ["10.50.0.1", "10.50.0.2", "10.50.0.9", "10.50.0.10"]
    assert variables["10.50.0.1"]["ansible_connection"] == "local"
    assert listed["every"]["hosts"] == ["10.50.0.1", "10.50.0.9", "10.50.0.10"]
    assert variables["10.50.0.2"]["first"] == "cluster" and "10.50.0.2" not in listed["cluster"].get("hosts", [])
    # A machine that is not trusted joins no group of its own choice.
    assert listed["ollama_model_qwen2_5_0_5b"]["hosts"] == ["10.50.0.9"]
    assert listed["ollama_family_llama"]["hosts"] == ["10.50.0.9"]
    nine = variables["10.50.0.9"]
    assert (nine["ansible_host"], nine["discovered_url"]) == ("10.50.0.9", "http://10.50.0.9:11434")
    assert (nine["discovered_version"], nine["discovered_vram"]) == ("0.12.3", 5)
    assert nine["discovered_response_ms"] > 0
    assert nine["discovered_models"][1] == {
        "name": "qwen2.5:0.5b",
        "size": 397821319,
        "digest": qwen["digest"],
        "family": "qwen2",
        "parameters": "494.03M",
        "quantisation": "Q4_K_M",
        "modified_at": qwen["modified_at"],
        "remote": "",
    }
    assert "4 machines found, 3 ready: distributed training is possible" in done.stderr
    assert afterwards["workers"]["hosts"] == ["10.50.0.2", "10.50.0.9", "10.50.0.10"]
    assert "untrusted" not in afterwards


@pytest.mark.lab
def test_a_changed_key_is_not_trusted(net):
    net.source("ollama.yml", {"plugin": "ollama"})
    with serve([net.server(9)]), net.sshd(9), net.sshd(10):
        until_ssh_is_up(net, 9)
        (net.folder / "key9.pub").write_text((net.folder / "key10.pub").read_text())
        accept(net, 9)
        done = net.graph()
    assert "10.50.0.9 is untrusted: its SSH host key is not the one in known_hosts" in done.stderr
    assert "1 machine found: distributed training is not useful" in done.stderr


@pytest.mark.lab
def test_found_machines_join_the_declared_ones(net):
    hosts = {
        "alpha": {"ansible_host": "10.50.0.10", "color": "red"},
        "10.50.0.9": None,
        "beta": {"ansible_host": "10.50.0.3"},
    }
    tree = {
        "head": {"hosts": {"alpha": hosts["alpha"]}},
        "workers": {"hosts": {k: hosts[k] for k in ("10.50.0.9", "beta")}},
    }
    net.source("hosts.yml", {"cluster": {"children": tree, "vars": {"ansible_port": 22}}})
    net.source("ollama.yml", {"plugin": "ollama"})
    with serve([net.server(i, models=[model("m")]) for i in (2, 9, 10)]), net.sshd(2):
        until_ssh_is_up(net, 2)
        accept(net, 2)
        listed = net.list()
    assert listed["head"]["hosts"] == ["alpha"]
    assert listed["workers"]["hosts"] == ["10.50.0.9", "beta", "10.50.0.2"]
    assert sorted(listed["_meta"]["hostvars"]) == ["10.50.0.2", "10.50.0.9", "alpha", "beta"]
    alpha = listed["_meta"]["hostvars"]["alpha"]
    assert (alpha["ansible_host"], alpha["color"], alpha["discovered_url"]) == (
        "10.50.0.10",
        "red",
        "http://10.50.0.10:11434",
    )
    assert listed["ollama_model_m"]["hosts"] == ["10.50.0.2"]  # the other keys have not been accepted
    assert listed["_meta"]["hostvars"]["alpha"]["discovered_scan"]["verdict"].startswith(
        "3 machines found, 1 more declared, 2 ready"
    )


@pytest.mark.lab
def test_the_head_is_chosen_by_rule(net):
    servers = [net.server(9), net.server(10), Server("10.50.0.1", namespace=net.prefix[-1])]
    with serve(servers), net.sshd(9), net.sshd(10):
        until_ssh_is_up(net, 9, 10)
        accept(net, 9)
        accept(net, 10)
        for rule, head in (("lowest", 1), ("this_machine", 1), ("10.50.0.10", 10), ("10.50.0.77", 1)):
            net.sources = []
            net.source("ollama.yml", {"plugin": "ollama", "head": rule})
            assert net.list()["head"]["hosts"] == [f"10.50.0.{head}"], rule
        net.sources = []
        net.source("ollama.yml", {"plugin": "ollama", "head": "10.50.0.77", "strict": True})
        assert "head: 10.50.0.77 is not among the machines that are ready" in net.graph().stderr


def config(**options) -> dict:
    return {"plugin": "ollama", "networks": ["127.0.10.0/29"], "ports": [18434], "this_machine": False, **options}


@pytest.mark.slow
def test_text_from_the_network_is_never_a_template(here, tmp_path):
    cache = {"cache": True, "cache_plugin": "jsonfile", "cache_connection": str(tmp_path / "cache")}
    here.source("ollama.yml", config(compose={"first": "discovered_models[0].name"}, **cache))
    texts = {"seen": "{{ discovered_models[0].name }}|{{ first }}", "all": "{{ discovered_models | to_json }}"}
    tasks = [{"copy": {"content": text, "dest": f"{tmp_path}/{name}"}} for name, text in texts.items()]
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "discovered", "gather_facts": False, "tasks": tasks}]))
    for _ in ("scanned", "from the cache"):
        with serve([Server("127.0.10.1", 18434, models=[model(PROGRAM, family=PROGRAM)])]):
            done = here.run("ansible-playbook", str(tmp_path / "play.yml"))
        assert done.returncode == 0, done.stdout + done.stderr
        assert (tmp_path / "seen").read_text() == f"{PROGRAM}|{PROGRAM}"
        assert json.loads((tmp_path / "all").read_text())[0]["family"] == PROGRAM
        assert "uid=" not in done.stdout


@pytest.mark.slow
def test_a_cached_scan_is_reported(here, tmp_path):
    cache = {
        "cache": True,
        "cache_plugin": "jsonfile",
        "cache_connection": str(tmp_path / "cache"),
        "cache_timeout": 60,
    }
    here.source("ollama.yml", config(**cache))
    with serve([Server("127.0.10.1", 18434)]):
        first = here.graph()
    second = here.graph()
    assert "not scanned:" not in first.stderr
    assert re.search(
        r"not scanned: the cached result is \d+ s old \(cache_timeout 60 s\) and may be outdated", second.stderr
    )
    assert first.stdout == second.stdout and "127.0.10.1" in second.stdout
    assert "127.0.10.1" not in here.run("ansible-inventory", "--graph", "--flush-cache").stdout
    here.sources = []
    here.source("ollama.yml", config(**cache, exclude=["127.0.10.3"]))
    assert "not scanned:" not in here.graph().stderr  # other options need another scan
    for file in (tmp_path / "cache").iterdir():
        file.write_text(json.dumps({"__payload__": json.dumps({"machines": "none"})}))
    damaged = here.graph()
    assert damaged.returncode == 0 and "is damaged: scanning again" in damaged.stderr


@pytest.mark.slow
def test_constructed_groups_and_strict(here):
    options = {
        "compose": {"names": "discovered_models | map(attribute='name') | list"},
        "groups": {"large": "discovered_models | selectattr('size', 'gt', 1000) | list | length > 0"},
        "keyed_groups": [{"key": "discovered_models | map(attribute='quantisation') | list", "prefix": "q"}],
    }
    here.source("ollama.yml", config(**options))
    with serve([Server("127.0.10.1", 18434, models=[model("b"), model("a")])]):
        listed = here.list()
        here.sources = []
        here.source("ollama.yml", config(compose={"x": "nothing.here"}, strict=True))
        strict = here.graph()
    assert listed["_meta"]["hostvars"]["127.0.10.1"]["names"] == ["a", "b"]
    assert listed["large"]["hosts"] == listed["q_Q4_K_M"]["hosts"] == ["127.0.10.1"]
    assert strict.returncode != 0 and "Could not set x" in strict.stderr


def test_this_machine_declared_as_two_nodes_stays_two_nodes(here):
    local = {"hosts": {"node1": {"ansible_connection": "local"}, "node2": {"ansible_connection": "local"}}}
    here.source("local.yml", {"cluster": local})
    here.source("ollama.yml", config())
    with serve([Server("127.0.10.1", 18434)]):
        listed = here.list()
    assert listed["discovered"]["hosts"] == ["node1", "node2"]
    assert (listed["head"]["hosts"], listed["workers"]["hosts"]) == (["node1"], ["node2"])
    assert sorted(listed["_meta"]["hostvars"]) == ["node1", "node2"]


@pytest.mark.parametrize(("options", "words"), table("plugin")["an_invalid_option_is_an_error_with_its_name"])
def test_an_invalid_option_is_an_error_with_its_name(here, options, words):
    here.source("ollama.yml", config(**options))
    done = here.graph()
    assert done.returncode != 0
    assert words in " ".join(done.stderr.split())
    assert "Traceback" not in done.stderr


def documentation() -> dict:
    done = subprocess.run(
        [BIN / "ansible-doc", "-t", "inventory", "--json", "ollama"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=True,
    )
    return json.loads(done.stdout)["ollama"]["doc"]


def test_every_option_is_documented_and_in_ollama_yml():
    options = documentation()["options"]
    inventory = yaml.safe_load((TOP / "inventory/ollama.yml").read_text())
    unsupported = {
        "cache_prefix",
        "use_extra_vars",
        "leading_separator",
    }  # options of Ansible that this plugin does not use
    assert set(options) - unsupported == set(inventory)
    for name, option in options.items():
        assert option["description"], name
        if name not in unsupported | {"plugin"} and not name.startswith("cache_"):
            assert inventory[name] == option["default"], name
        if "timeout" in name:
            assert "econds" in str(option["description"]), name


def test_the_example_is_an_inventory(here):
    done = subprocess.run(
        [BIN / "ansible-inventory", "-i", "inventory/hosts.example.yml", "--graph", "cluster"],
        cwd=TOP,
        capture_output=True,
        text=True,
        check=True,
    )
    assert re.findall(r"node\d", done.stdout) == ["node1", "node2", "node3"]


@pytest.fixture
def without_trainyard(tmp_path, environment):
    """The environment of ansible commands, in which the package trainyard cannot be imported."""
    (tmp_path / "shadow/trainyard").mkdir(parents=True)
    line = 'raise ModuleNotFoundError("No module named \'trainyard\'", name="trainyard")\n'
    (tmp_path / "shadow/trainyard/__init__.py").write_text(line)
    return environment | {"PYTHONPATH": f"{tmp_path}/shadow:{environment.get('PYTHONPATH', '')}"}


def test_inventory_without_the_package_is_a_one_line_error(tmp_path, without_trainyard):
    here = Inventory(tmp_path, without_trainyard)
    here.source("ollama.yml", config())
    done = here.graph()
    assert done.returncode != 0 and done.stdout == ""
    [line] = done.stderr.splitlines()
    assert line.startswith("error: Ansible's Python (") and "the package trainyard: run make setup" in line


def test_playbook_without_the_package_is_a_one_line_error(tmp_path, without_trainyard):
    """Action plugins and filters import the package; the callback is loaded before them."""
    task = {"trainyard": {"command": "preflight"}}
    (tmp_path / "play.yml").write_text(yaml.safe_dump([{"hosts": "all", "gather_facts": False, "tasks": [task]}]))
    here = Inventory(tmp_path, without_trainyard)
    done = here.run("ansible-playbook", "-i", "a,", str(tmp_path / "play.yml"))
    assert done.returncode != 0
    [line] = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
    assert "does not have the package trainyard: run make setup" in line


@pytest.mark.lab
def test_identity_yml_finds_duplicates_after_login(lab, tmp_path, environment):
    """Two entries for one machine, and another machine, over real SSH; each machine has its own boot id."""
    if not shutil.which("ssh"):
        pytest.skip("needs OpenSSH's client")
    lab.controller("10.51.0.1/28")
    nodes = {"one": lab.node("one", "10.51.0.5/28", "10.51.0.6/28"), "two": lab.node("two", "10.51.0.9/28")}
    lab.wait_for_links()
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", tmp_path / "login"], check=True)
    (tmp_path / "authorized_keys").write_text((tmp_path / "login.pub").read_text())
    (tmp_path / "boot_id").write_text("11111111-2222-3333-4444-555555555555\n")
    bind = f'mount --bind {tmp_path}/boot_id /proc/sys/kernel/random/boot_id && exec "$@"'
    own_boot_id = ["unshare", "--mount", "sh", "-c", bind, "-"]
    ssh = f"-o UserKnownHostsFile={tmp_path}/known_hosts -o StrictHostKeyChecking=accept-new -o ConnectionAttempts=10"
    inventory = Inventory(tmp_path, environment, lab.control)
    hosts = {"a": "10.51.0.5", "b": "10.51.0.6", "c": "10.51.0.9"}
    common = {
        "ansible_user": "root",
        "ansible_ssh_private_key_file": str(tmp_path / "login"),
        "ansible_ssh_common_args": ssh,
        "ansible_python_interpreter": "/usr/bin/python3",
    }
    inventory.source(
        "hosts.yml", {"cluster": {"hosts": {n: {"ansible_host": a} for n, a in hosts.items()}, "vars": common}}
    )
    with (
        sshd(tmp_path, "one", "0.0.0.0", 22, nodes["one"], before=own_boot_id),
        sshd(tmp_path, "two", "0.0.0.0", 22, nodes["two"]),
    ):
        until_ssh_is_up(inventory, *hosts.values())
        done = inventory.run("ansible-playbook", "playbooks/identity.yml")
    assert done.returncode == 0, done.stdout + done.stderr
    output = " ".join(done.stdout.split())
    assert "remove b: it is the same machine as a (same boot id)" in output
    assert "a and c are clones of one image (same machine-id)" in output
    assert "2 machines in 3 entries: distributed training is useful" in output
