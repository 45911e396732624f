"""Reading the rules in ufw's files and planning changes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tables import table

from plugins.module_utils.ufw import ANYWHERE, Rule, allow_rules, command_words, describe, parse_rules, plan_changes

# As ufw 0.36.2 wrote them.
USER_RULES = table("ufw")["user_rules"]


def test_rules_that_ufw_wrote() -> None:
    first, second, named, limited, routed = parse_rules(USER_RULES, 4)
    assert first == Rule(4, "allow", "tcp", "22", "0.0.0.0/0", "any", "0.0.0.0/0", "in", "trainyard: x")
    assert second.source == "10.231.3.10" and second.port == "any" and second.comment == "trainyard y"
    assert named.rest == "OpenSSH - in" and named.comment == "" and named.identity != first.identity
    assert limited.action == "limit" and limited.rest == "in_enp1s0"
    assert routed.action == "route:allow"


@pytest.mark.parametrize(("port", "protocol", "source", "message"), table("ufw")["values_that_ufw_rejects"])
def test_values_that_ufw_rejects(port: str, protocol: str, source: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        allow_rules(port, protocol, source, "")


def test_any_source_needs_a_rule_per_family() -> None:
    four, six = allow_rules("22", "tcp", "any", "c")
    assert (four.family, four.source, six.family, six.source) == (4, "0.0.0.0/0", 6, "::/0")
    assert command_words(four) == ["allow", "proto", "tcp", "from", "0.0.0.0/0", "to", "0.0.0.0/0", "port", "22"]
    words = command_words(*allow_rules("any", "tcp", "fd00:0::1", "c"))
    assert words == ["allow", "proto", "tcp", "from", "fd00::1", "to", "::/0"]
    words = command_words(*allow_rules("any", "any", "10.0.0.9/24", "c"))
    assert words == ["allow", "from", "10.0.0.0/24", "to", "0.0.0.0/0"]
    assert describe(six) == "allow 22/tcp from anywhere (v6)  # c"


rules = st.builds(
    Rule,
    family=st.sampled_from([4, 6]),
    action=st.sampled_from(["allow", "deny", "limit", "route:allow"]),
    protocol=st.sampled_from(["tcp", "udp", "any"]),
    port=st.sampled_from(["22", "any", "6000:6010"]),
    target=st.just("0.0.0.0/0"),
    source_port=st.just("any"),
    source=st.sampled_from([*ANYWHERE.values(), "10.0.0.1", "10.0.0.2"]),
    rest=st.sampled_from(["in", "in_eth0", "OpenSSH - in"]),
    comment=st.one_of(st.sampled_from(["", "mine", "trainyard: a", "trainyard: b"]), st.text(max_size=20)),
)


def as_ufw_writes(rule: Rule) -> str:
    comment = f" comment={rule.comment.encode().hex()}" if rule.comment else ""
    return " ".join(["### tuple ###", *(str(word) for word in rule[1:8])]) + comment


@given(st.lists(rules))
def test_rules_are_read_as_ufw_writes_them(some: list[Rule]) -> None:
    text = "*filter\n" + "\n-A whatever\n".join(as_ufw_writes(rule) for rule in some)
    assert parse_rules(text, 4) == [rule._replace(family=4) for rule in some]


@given(st.text())
def test_any_text_can_be_read(text: str) -> None:
    for rule in parse_rules(text, 6):
        assert rule.family == 6


def unique(some: list[Rule]) -> list[Rule]:
    return list({rule.identity: rule for rule in some}.values())


@pytest.mark.slow
@given(st.lists(rules).map(unique), st.lists(rules).map(unique))
def test_changes_converge_and_keep_other_rules(current: list[Rule], desired: list[Rule]) -> None:
    desired = [rule._replace(comment=f"trainyard: {rule.comment}") for rule in desired]
    delete, add = plan_changes(current, "trainyard", desired)
    assert all(rule.comment.startswith("trainyard") for rule in delete)
    after = {rule.identity: rule for rule in current if rule not in delete} | {rule.identity: rule for rule in add}
    assert plan_changes(after.values(), "trainyard", desired) == ([], [])
    assert {rule.identity for rule in desired} <= set(after)
    for rule in current:
        if not rule.comment.startswith("trainyard"):
            assert after[rule.identity] == rule


def test_outgoing_connections_to_the_peers() -> None:
    (rule,) = allow_rules("any", "any", "10.0.0.2", "peer")
    rule = rule._replace(target=rule.source, source=ANYWHERE[4], rest="out")
    assert command_words(rule) == ["allow", "out", "from", "0.0.0.0/0", "to", "10.0.0.2"]
    assert parse_rules(as_ufw_writes(rule), 4) == [rule] and describe(rule) == "allow any any to 10.0.0.2  # peer"
