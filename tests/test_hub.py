"""`ctxext push` against a stand-in for the hub on this machine: what arrives there is what the folder holds."""

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import yaml
from conftest import pico_model, run

import ctxext
from ctxext.errors import CtxextError, CtxextWarning, UsageError
from ctxext.folders.push import card_for_hub, push


class Hub(BaseHTTPRequestHandler):
    """The few calls of the hub's API that one commit makes."""

    def log_message(self, *args):
        pass

    def body(self):
        return self.rfile.read(int(self.headers.get("Content-Length", 0)))

    def answer(self, data, status=200):
        raw = json.dumps(data).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(raw)))
        self.end_headers()
        self.wfile.write(raw)

    def do_PUT(self):
        self.server.blobs[self.path.rpartition("/")[2]] = self.body()
        self.answer({})

    def do_POST(self):
        server, raw = self.server, self.body()
        server.calls.append((self.path, self.headers.get("Authorization")))
        base = f"http://127.0.0.1:{server.server_port}"
        if self.headers.get("Authorization") != "Bearer secret":
            self.answer({"error": "Invalid credentials"}, 401)
        elif self.path == "/api/repos/create":
            server.created.append(json.loads(raw))
            self.answer({"url": f"{base}/me/model"})
        elif self.path == "/api/validate-yaml":
            self.answer({"warnings": [], "errors": []})
        elif "/preupload/" in self.path:
            files = json.loads(raw)["files"]
            mode = {True: "lfs", False: "regular"}
            self.answer(
                {
                    "files": [
                        {
                            "path": f["path"],
                            "uploadMode": mode[f["path"].endswith(".safetensors")],
                            "shouldIgnore": False,
                        }
                        for f in files
                    ]
                }
            )
        elif self.path.endswith("/objects/batch"):
            objects = [
                {**o, "actions": {"upload": {"href": f"{base}/blobs/{o['oid']}", "header": {}}}}
                for o in json.loads(raw)["objects"]
            ]
            self.answer({"transfer": "basic", "objects": objects})
        elif "/commit/" in self.path:
            server.commits.append([json.loads(line) for line in raw.splitlines()])
            pr = {"pullRequestUrl": f"{base}/me/model/discussions/1"} if "create_pr" in self.path else {}
            self.answer(
                {"success": True, "commitOid": "a" * 40, "commitUrl": f"{base}/me/model/commit/{'a' * 40}"} | pr
            )
        else:
            self.answer({"error": self.path}, 404)


@pytest.fixture
def hub():
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    server.calls, server.created, server.commits, server.blobs = [], [], [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield server
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    root = tmp_path_factory.mktemp("push")
    pico_model().save_pretrained(root / "pico")
    (root / "pico" / "tokenizer_config.json").write_text(json.dumps({"model_max_length": 64}))
    return ctxext.patch_checkpoint(root / "pico", root / "pico-yarn", method="yarn", factor=4).out


def send(hub, *args, token="secret"):
    """The command in a process of its own, which knows the stand-in as the hub and no other network."""
    command = ["ctxext", "push", *map(str, args)]
    code = f"import sys; sys.argv = {command!r}; from ctxext.cli.app import main; main()"
    environment = os.environ | {
        "HF_ENDPOINT": f"http://127.0.0.1:{hub.server_port}",
        "HF_HUB_OFFLINE": "0",
        "HF_TOKEN": token,
        "HF_HUB_DISABLE_XET": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    return subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)


def test_what_arrives(hub, folder, tmp_path):
    (folder / "config.json.before-doctor").write_text("{}")
    ran = send(hub, folder, "me/model", "--base-model", "them/pico", "--license", "mit", "--private")
    assert ran.returncode == 0, ran.stderr
    assert f"/me/model/commit/{'a' * 40}" in ran.stdout
    (created,) = hub.created
    assert (created["name"], created["organization"]) == ("model", "me")
    assert created.get("private") is True or created.get("visibility") == "private"
    (lines,) = hub.commits
    files = {x["value"]["path"]: base64.b64decode(x["value"]["content"]) for x in lines if x["key"] == "file"}
    large = {x["value"]["path"]: x["value"]["oid"] for x in lines if x["key"] == "lfsFile"}
    assert files.keys() | large.keys() == {p.name for p in folder.iterdir()} - {"config.json.before-doctor"}
    weights = (folder / "model.safetensors").read_bytes()
    assert large == {"model.safetensors": hashlib.sha256(weights).hexdigest()}
    assert hub.blobs[large["model.safetensors"]] == weights
    for name in ("config.json", "tokenizer_config.json"):
        assert files[name] == (folder / name).read_bytes()
    _, meta, text = files["README.md"].decode().split("---\n", 2)
    assert yaml.safe_load(meta) == {
        "base_model": "them/pico",
        "library_name": "transformers",
        "license": "mit",
        "tags": ["ctxext", "long-context", "yarn"],
    }
    assert "Who will run it" in text
    assert "base_model: pico" in (folder / "README.md").read_text()
    assert {auth for _, auth in hub.calls} == {"Bearer secret"}
    ran = send(hub, folder, "me/model", "--create-pr", "--json")
    assert json.loads(ran.stdout)["url"].endswith("/discussions/1")


def test_a_refusal(hub, folder):
    ran = send(hub, folder, "me/model", token="wrong")
    assert ran.returncode == 1
    assert "the hub refused me/model" in ran.stderr
    assert "hf auth login" in ran.stderr
    assert "Traceback" not in ran.stderr
    assert hub.commits == []


@pytest.mark.filterwarnings("ignore:base_model 'pico' is no hub id")
def test_a_wrong_folder_is_not_sent(folder, tmp_path, monkeypatch, capsys):
    broken = tmp_path / "broken"
    broken.mkdir()
    for path in folder.iterdir():
        (broken / path.name).write_bytes(path.read_bytes())
    config = json.loads((broken / "config.json").read_text())
    config["rope_scaling"]["factor"] = 2.0
    (broken / "config.json").write_text(json.dumps(config))
    with pytest.raises(CtxextError, match="has 1 error"):
        push(broken, "me/model", dry_run=True)
    assert push(broken, "me/model", dry_run=True, force=True).url is None
    with pytest.raises(UsageError, match="is no hub id"):
        push(folder, "just-a-name")
    with pytest.raises(UsageError, match="base_model 'pico' is no hub id"):
        push(folder, "me/model", base_model="pico")
    # The suite runs with HF_HUB_OFFLINE set: nothing can be sent from this process.
    with pytest.raises(CtxextError, match="HF_HUB_OFFLINE is set"):
        push(folder, "me/model")
    code, out, _ = run(monkeypatch, capsys, "push", folder, "me/model", "--dry-run", "--base-model", "a/b")
    assert code == 0
    assert "base_model: a/b" in out
    assert "would send: README.base.md, README.md" in out or "would send: README.md" in out


def test_cards_that_others_wrote(tmp_path):
    """Their metadata stays, a base model that is no id goes, and a folder without a card gets one."""
    (tmp_path / "README.md").write_text("---\nbase_model: local-name\nlanguage: en\ntags: [a]\n---\n# mine\n")
    with pytest.warns(CtxextWarning, match="is no hub id"):
        card = card_for_hub(tmp_path)
    meta = yaml.safe_load(card.split("---\n")[1])
    assert meta["language"] == "en"
    assert meta["tags"] == ["a", "ctxext", "long-context"]
    assert "base_model" not in meta
    assert "# mine" in card
    (tmp_path / "README.md").unlink()
    assert card_for_hub(tmp_path, "a/b").startswith("---\nbase_model: a/b")
