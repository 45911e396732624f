"""Editing the address of one NIC in netplan's files, and errors in the addresses of an inventory."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from plugins.module_utils.netplan_files import MANAGED_FILE, AddressSettings, Nic, definitions, edit, is_nic, load
from trainyard.provision.addresses import address_errors
from trainyard.wire.known_hosts import KnownHosts, find_known_hosts

NIC = Nic("enp1s0", "02:79:00:00:03:09", gateway="192.168.1.1", dns=("192.168.1.1",))
SETTINGS = AddressSettings("192.168.1.11/24")
CLOUD_INIT = table("netplan_files")["cloud_init"]


def after(files: dict[str, str], changed: dict[str, str | None]) -> dict[str, str]:
    return {name: text for name, text in {**files, **changed}.items() if text is not None}


def managed_definition(files: dict[str, str], nic: Nic = NIC, section: str = "ethernets") -> dict[str, Any]:
    """Return the NIC's definition in the managed file, as YAML reads it."""
    devices = yaml.safe_load(files[MANAGED_FILE])["network"][section]
    return next(definition for identity, definition in devices.items() if is_nic(identity, definition, nic))


def test_from_dhcp_to_a_static_address() -> None:
    files = {"50-cloud-init.yaml": CLOUD_INIT}
    changed = edit(files, NIC, SETTINGS)
    new = after(files, changed)
    assert managed_definition(new) == table("netplan_files")["from_dhcp"]
    rest = yaml.safe_load(new["50-cloud-init.yaml"])["network"]["ethernets"]
    assert rest == {"enp2s0": {"addresses": ["10.0.0.1/24"], "optional": True}}
    assert edit(new, NIC, SETTINGS) == {}


def test_a_file_for_only_this_nic_is_removed_and_other_files_are_not_written() -> None:
    files = table("netplan_files")["files"]
    changed = edit(files, NIC, SETTINGS)
    assert set(changed) == {"10-one.yaml", MANAGED_FILE}
    assert changed["10-one.yaml"] is None


def test_a_definition_for_several_nics_stays_and_the_managed_one_precedes_it() -> None:
    files = {"50.yaml": 'network: {version: 2, ethernets: {all-en: {match: {name: "en*"}, dhcp4: true, dhcp6: true}}}'}
    changed = edit(files, NIC, SETTINGS)
    assert set(changed) == {MANAGED_FILE}
    devices = yaml.safe_load(str(changed[MANAGED_FILE]))["network"]["ethernets"]
    (identity,) = devices
    assert identity < "all-en"
    assert devices[identity]["match"] == {"name": "enp1s0"} and devices[identity]["dhcp6"] is True
    assert edit(after(files, changed), NIC, SETTINGS) == {}


def test_settings_of_the_inventory_override_existing_files() -> None:
    static = table("netplan_files")["static"]
    kept = managed_definition(after({}, edit({"1.yaml": static}, NIC, SETTINGS)))
    assert kept["addresses"] == ["fd00::57/64", "192.168.1.11/24"] and "gateway4" not in kept
    assert kept["routes"] == [{"to": "10.9.0.0/16", "via": "192.168.1.2"}, {"to": "default", "via": "192.168.1.254"}]
    assert kept["nameservers"] == {"addresses": ["9.9.9.9"], "search": ["lan"]}
    changed_settings = AddressSettings("192.168.1.11/24", gateway="192.168.1.3", dns=("1.1.1.1",), mtu=9000)
    new = managed_definition(after({}, edit({"1.yaml": static}, NIC, changed_settings)))
    assert new["routes"][-1] == {"to": "default", "via": "192.168.1.3"} and new["mtu"] == 9000
    assert new["nameservers"] == {"addresses": ["1.1.1.1"], "search": ["lan"]}
    none = managed_definition(
        after({}, edit({"1.yaml": static}, NIC, AddressSettings("192.168.1.11/24", gateway="none", dns=())))
    )
    assert none["routes"] == [{"to": "10.9.0.0/16", "via": "192.168.1.2"}]
    assert none["nameservers"] == {"search": ["lan"]}
    # The gateway of the old network is not in the new network: there is no default route.
    assert "routes" not in managed_definition(after({}, edit({}, NIC, AddressSettings("10.5.0.2/24"))))


def test_address_on_a_bridge() -> None:
    files = {"1.yaml": "network: {ethernets: {enp1s0: {}}, bridges: {br0: {interfaces: [enp1s0], dhcp4: yes}}}"}
    bridge = Nic("br0", "02:79:00:00:00:01")
    new = after(files, edit(files, bridge, SETTINGS))
    assert managed_definition(new, bridge, "bridges") == table("netplan_files")["address_on_a_bridge"]
    assert "enp1s0" in new["1.yaml"]


@pytest.mark.parametrize("text", ["network: [a]", "network: {", "- x", "\t"])
def test_an_invalid_file_is_a_one_line_error(text: str) -> None:
    with pytest.raises(ValueError, match=r"^/etc/netplan/9\.yaml [^\n]*$"):
        edit({"9.yaml": text}, NIC, SETTINGS)


names = st.sampled_from(["enp1s0", "enp2s0", "enp3s0", "eth0"])
some = st.fixed_dictionaries(
    {},
    optional={
        "dhcp4": st.booleans(),
        "dhcp6": st.booleans(),
        "mtu": st.sampled_from([1400, 9000]),
        "addresses": st.lists(st.sampled_from(["10.0.0.5/24", "192.168.1.7/24", "fd00::7/64"]), max_size=3),
        "routes": st.lists(
            st.sampled_from([{"to": "default", "via": "192.168.1.9"}, {"to": "10.9.0.0/16", "via": "192.168.1.2"}]),
            max_size=2,
            unique_by=lambda route: route["to"],
        ),
        "nameservers": st.just({"addresses": ["9.9.9.9"]}),
        "match": st.sampled_from([{"name": "en*"}, {"macaddress": "02:79:00:00:03:09"}, {"name": "enp1s0"}]),
    },
)
files = st.dictionaries(
    st.sampled_from(["10-a.yaml", "50-cloud-init.yaml", "90-z.yaml"]),
    st.builds(
        lambda devices: yaml.safe_dump({"network": {"version": 2, "ethernets": devices}}),
        st.dictionaries(names, some, max_size=3),
    ),
)


@pytest.mark.slow
@given(
    files,
    st.sampled_from(
        [SETTINGS, AddressSettings("10.1.0.3/16", gateway="10.1.0.1", mtu=1300), AddressSettings("fd00::3/64")]
    ),
)
def test_an_edit_is_idempotent_and_preserves_other_nics(before: dict[str, str], settings: AddressSettings) -> None:
    try:
        new = after(before, edit(before, NIC, settings))
    except ValueError:
        return  # a shared definition whose name sorts first
    assert edit(new, NIC, settings) == {}
    assert settings.address in managed_definition(new)["addresses"]

    def other_definitions(files: dict[str, str]) -> list[Any]:
        trees = {name: load(name, text) for name, text in sorted(files.items())}
        return [
            (file, identity, definition)
            for file, _, identity, definition in definitions(trees)
            if not is_nic(identity, definition, NIC)
        ]

    assert other_definitions(new) == other_definitions(before)


@pytest.mark.slow
@given(st.text(), st.text())
def test_any_text_is_an_edit_or_a_one_line_error(one: str, other: str) -> None:
    try:
        edit({"1.yaml": one, "2.yaml": other}, NIC, SETTINGS)
    except ValueError as error:
        assert "\n" not in str(error)


@pytest.mark.parametrize(("variables", "message"), table("netplan_files")["errors_of_one_host"])
def test_errors_of_one_host(variables: dict[str, Any], message: str) -> None:
    (line,) = address_errors({"node1": {"netplan_address": "192.168.1.11/24", **variables}})
    assert line.startswith("node1: netplan_") and message in line


def test_conflicts_between_hosts() -> None:
    one = {"netplan_address": "192.168.1.11/24", "current": "192.168.1.57"}
    assert address_errors({"node1": one, "node2": {"current": "192.168.1.58"}}) == []
    assert address_errors({"node1": one, "node2": {"netplan_address": "192.168.1.11/24"}}) == [
        "netplan_address of node1 and node2 are both 192.168.1.11"
    ]
    assert address_errors({"node1": one, "node2": {"current": "192.168.1.11"}}) == [
        "netplan_address of node1 is 192.168.1.11, the current address of node2: change the address of node2 first"
    ]
    good = {"netplan_gateway": "none", "netplan_dns": [], "netplan_mtu": 9000, "netplan_nic": "02:79:00:00:03:09"}
    assert not address_errors({"node1": one | good, "node2": {"netplan_address": "fd00::2/64", "netplan_mtu": "1280"}})


def test_a_known_key_is_added_for_the_new_address(tmp_path: Path) -> None:
    for name in ("a", "b"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(tmp_path / name)], check=True)
    a, b = ((tmp_path / f"{name}.pub").read_text().rsplit(" ", 1)[0] for name in ("a", "b"))
    known = tmp_path / "known_hosts"
    known.write_text(f"[10.0.0.5]:2222 {a}\n10.0.0.6 {b}\n@revoked * {b}")
    hosts = find_known_hosts(
        "ssh", f"-F none -o UserKnownHostsFile={known} -o GlobalKnownHostsFile=/dev/null", "10.0.0.5", 2222
    )
    assert hosts == KnownHosts("[10.0.0.5]:2222", 2222, (known, Path("/dev/null")))
    assert hosts.keys(hosts.name) == {a}
    assert hosts.add_address("10.0.0.9") and not hosts.add_address("10.0.0.9")
    assert known.read_text().endswith(f"{b}\n[10.0.0.9]:2222 {a}\n")
    # A name that looks like an option is a name.
    with pytest.raises(subprocess.CalledProcessError) as refused:
        find_known_hosts("ssh", "-F none", "-oPort=1", None)
    assert "hostname contains invalid characters" in refused.value.stderr
    hashed = subprocess.run(["ssh-keygen", "-q", "-H", "-f", str(known)], capture_output=True)
    assert hashed.returncode == 0 and hosts.keys("[10.0.0.9]:2222") == {a}
