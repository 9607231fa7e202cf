"""No secret leaves: by name of flag and variable, by shape, by being known. And nothing else is touched."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hangguard.facts import Launch
from hangguard.redact import REDACTED, clean_text, redact, redact_argv, secrets_of

SECRET = "Zq7Xw3Kp9Lm2Vb5N"


@pytest.mark.parametrize(
    "flag",
    [
        *("--api-key", "--hf-token", "--admin-api-key", "--ssl-keyfile-password", "--hf_token", "--secret"),
        *("--db-password", "--token", "--client-secret", "--api_key", "--key"),
    ],
)
def test_flags_that_hold_secrets(flag):
    assert redact_argv(["s", flag, SECRET, "--x"]) == ("s", flag, REDACTED, "--x")
    assert redact_argv(["s", f"{flag}={SECRET}"]) == ("s", f"{flag}={REDACTED}")
    assert SECRET not in redact(f"started: s {flag} {SECRET} --x")
    assert SECRET not in redact(f"started: s {flag}={SECRET} --x")


@pytest.mark.parametrize(
    "flag",
    [
        *("--tokenizer", "--max-tokens", "--token-limit", "--kv-cache-dtype", "--ssl-keyfile", "--model", "--port"),
        *("--tokenizer-mode", "--max-num-batched-tokens", "--speculative-token-map", "--stop-token-ids"),
        *("--api-key-file", "--allow-credentials", "--enable-auth", "--num-reserved-decode-tokens", "--monkey"),
    ],
)
def test_flags_that_hold_none(flag):
    argv = ("s", flag, "value", "--x")
    assert redact_argv(argv) == argv
    assert redact_argv(["s", f"{flag}=value"]) == ("s", f"{flag}=value")
    assert redact(f"s {flag} value") == f"s {flag} value"


def test_several_keys_after_one_flag_and_a_flag_without_value():
    assert redact_argv(["--api-key", "aa", "bb", "--x"]) == ("--api-key", REDACTED, REDACTED, "--x")
    assert redact_argv(["--hf-token", "--x", "y"]) == ("--hf-token", "--x", "y")


@pytest.mark.parametrize(
    "name",
    [
        *("HF_TOKEN", "OPENAI_API_KEY", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_ACCESS_KEY_ID"),
        *("MY_SECRET_THING", "DB_PASSWORD", "hf_token", "apiKey", "api_key", "GITHUB_PAT", "PGPASSWORD_PASSWD"),
    ],
)
def test_variables_and_json_keys_that_hold_secrets(name):
    assert redact({name: SECRET}) == {name: REDACTED}
    assert redact({"env": [(name, SECRET)]}) == {"env": [(name, REDACTED)]}
    assert redact({"env": ((name, SECRET), ("PATH", "/bin"))}) == {"env": ((name, REDACTED), ("PATH", "/bin"))}
    assert redact_argv(["env", f"{name}={SECRET}", "s"]) == ("env", f"{name}={REDACTED}", "s")
    assert SECRET not in redact(f"it ran with {name}={SECRET}, then ended")
    assert SECRET not in redact(json.dumps({name: SECRET, "x": 1}))
    assert redact({name: None}) == {name: None}


@pytest.mark.parametrize(
    "name", ["PATH", "PWD", "OLDPWD", "SSH_AUTH_SOCK", "AWS_REGION", "TOKENIZERS_PARALLELISM", "key"]
)
def test_variables_that_hold_none(name):
    assert redact({name: "value"}) == {name: "value"}


@pytest.mark.parametrize(
    "shape",
    [
        *("hf_abcdefghijklmnopqrstuv", "sk-abcdefghijklmnopqrst", "sk-proj-abc_defghijklmnop", "ghp_" + "a1" * 18),
        *("github_pat_" + "a1" * 20, "AKIAABCDEFGHIJKLMNOP", "xoxb-1234567890-abc", "nvapi-abcdefghijklmnopqrst"),
        "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxIn0.abcDEF123_-x",
    ],
)
def test_shapes_of_well_known_tokens(shape):
    assert redact(f"found {shape} in it") == f"found {REDACTED} in it"
    assert redact_argv(["s", "--x", shape]) == ("s", "--x", REDACTED)


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("GET http://me:pa@ss@host:80/x", "GET http://me:REDACTED@host:80/x"),
        ("redis://:pw123@host", "redis://:REDACTED@host"),
        ("http://host:8000/v1 is up", "http://host:8000/v1 is up"),
        ("-H 'Authorization: Bearer abc'", "-H 'Authorization: Bearer REDACTED'"),
        ("authorization=Basic dXNlcg==", "authorization=Basic REDACTED"),
        ("sent bearer abcdef123456 along", "sent bearer REDACTED along"),
        ("the bearer understood", "the bearer understood"),
        (
            "non-default args: {'api_key': ['abc', 'def'], 'port': 5, 'hf_token': None}",
            "non-default args: {'api_key': REDACTED, 'port': 5, 'hf_token': None}",
        ),
        ("ServerArgs(api_key='abc', tokenizer_path='M')", "ServerArgs(api_key='REDACTED', tokenizer_path='M')"),
        ("Decode batch, #token: 24, token usage: 0.00", "Decode batch, #token: 24, token usage: 0.00"),
        (
            "Prefill batch, #new-seq: 1, #new-token: 26, #cached-token: 0",
            "Prefill batch, #new-seq: 1, #new-token: 26, #cached-token: 0",
        ),
        ("token: 5", "token: 5"),
        ("?token=abc&x=1", "?token=REDACTED&x=1"),
        ("the key: a lock", "the key: a lock"),
        ("eos_token_id=2, bos_token='<s>'", "eos_token_id=2, bos_token='<s>'"),
    ],
)
def test_texts(text, after):
    assert redact(text) == after
    assert redact(after) == after


def test_real_log_lines_keep_what_they_say():
    from pathlib import Path

    for path in (Path(__file__).parent / "engines" / "logs").glob("*.log"):
        for line in path.read_text("utf-8", "replace").splitlines():
            if REDACTED in redact(line):
                assert "api_key" in line or "token=" in line, line


def launch_of(*argv, env=(), api_key=None):
    return Launch(argv=argv, env=tuple(env), cwd="/", url="http://h:1", host="h", port=1, api_key=api_key)


def test_known_secrets_go_wherever_they_stand():
    launch = launch_of(
        *("s", "--api-key", "flagsecret", "--hf-token=othersecret"),
        env=[("HF_TOKEN", "envsecret"), ("PWD", "/home/me"), ("X_KEY", "ab")],
        api_key="plainsecret",
    )
    known = secrets_of(launch)
    assert known == {"flagsecret", "othersecret", "envsecret", "plainsecret"}
    text = "a flagsecret b=othersecret:envsecret/plainsecret ab /home/me"
    assert redact({"t": [text]}, known) == {"t": ["a REDACTED b=REDACTED:REDACTED/REDACTED ab /home/me"]}
    assert redact("xx REDACT", {"REDACT", "xx"}) == "xx REDACT"  # too short, and a part of our own mark


def test_other_values_pass_as_they_are():
    value = {"a": [1, 2.5, None, True, (3, "x")], "b": {"c": ()}, 7: b"x", "key": "v"}
    assert redact(value) == value


json_like = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=30),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(st.text(max_size=12) | st.sampled_from(["HF_TOKEN", "argv", "api_key"]), inner, max_size=4)
    ),
    max_leaves=12,
)
pieces = st.sampled_from(
    [
        *("--api-key", "token", "=", ":", " ", "'", '"', "[", "]", "{", "}", ",", "Authorization", "Bearer", "http://"),
        *("@", "a", "u:p@h", "hf_" + "a" * 20, "HF_TOKEN", "REDACTED", "sk-" + "b" * 20, "\\", "\n", "basic", "eyJ"),
        *("--", "key", ".", "-", "_", ";", "&", "x1"),
    ]
)


@given(json_like)
def test_redact_is_idempotent_and_keeps_the_form(value):
    once = redact(value)
    assert redact(once) == once
    assert type(once) is type(value)


@settings(max_examples=1500)
@given(st.lists(pieces, max_size=14).map("".join))
def test_redact_is_idempotent_on_what_looks_like_secrets(text):
    once = redact(text)
    assert redact(once) == once


@given(st.lists(st.lists(pieces, max_size=4).map("".join), max_size=8))
def test_redact_argv_is_idempotent_and_keeps_the_count(words):
    once = redact_argv(words)
    assert redact_argv(once) == once
    assert len(once) == len(words)


secret_names = st.sampled_from(["api-key", "hf-token", "admin_api_key", "client-secret", "db-password"])
secrets = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=6, max_size=30).map(lambda s: "q" + s)
plain = st.lists(st.sampled_from(["s", "--port", "1", "M", "--enforce-eager", "x=1"]), max_size=4)


@given(secret_names, secrets, plain, plain, st.booleans())
def test_the_secret_never_survives_in_argv(name, secret, before, after, glued):
    words = [f"--{name}={secret}"] if glued else [f"--{name}", secret]
    known = {secret}
    shown = redact_argv([*before, *words, *after])
    assert not any(secret in word for word in shown)
    assert secret not in json.dumps(redact({"argv": [*before, *words, *after]}))
    assert secret not in redact({"text": f"xx{secret}yy"}, known)["text"]


@given(secret_names, secrets)
def test_the_secret_never_survives_in_a_mapping(name, secret):
    assert secret not in json.dumps(redact({"env": {name: secret}, "pairs": [(name.replace("-", "_"), secret)]}))


@given(st.text(st.characters(), max_size=60))
def test_clean_text_leaves_nothing_that_drives_a_terminal(text):
    clean = clean_text(text)
    assert clean_text(clean) == clean
    assert all(
        char == "\t" or not (ord(char) < 32 or 127 <= ord(char) < 160 or char in "\u202a\u202b\u202c\u202d\u202e")
        for char in clean
    )
    clean.encode("utf-8")


@pytest.mark.parametrize(
    ("text", "after"),
    [
        ("a\x1b[31mred\x1b[0m", "ared"),
        ("\x1b]0;title\x07x", "x"),
        ("\x1b]8;;http://x\x1b\\link", "link"),
        ("\x9b2Jx", "x"),
        ("tab\tstays\r\n", "tab\tstays"),
        ("\u202eabc\u2066d", "abcd"),
        ("\x1b", ""),
        ("\x1b[", ""),
        ("ä ▄█ 漢", "ä ▄█ 漢"),
        ("lone \ud800 half", "lone  half"),
    ],
)
def test_clean_text(text, after):
    assert clean_text(text) == after


def test_long_hostile_lines_take_no_long_time():
    import time

    began = time.process_time()
    for text in (
        "a" * 200_000,
        "a.b-" * 50_000,
        "--" * 100_000,
        "http://" * 20_000,
        "'api_key': ['" * 10_000,
        "[" * 99_999,
    ):
        redact(text)
        clean_text("\x1b]" + text)
    assert time.process_time() - began < 10


def test_a_key_is_no_less_secret_behind_an_abbreviated_flag():
    words = ["serve", "--api-k", "one-word-1", "--api_ke=one-word-2", "--api-server-count", "3"]
    assert redact_argv(words) == ("serve", "--api-k", REDACTED, f"--api_ke={REDACTED}", "--api-server-count", "3")
