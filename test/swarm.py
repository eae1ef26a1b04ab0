"""What tests of a swarm share: a hub and nodes that join it, as processes."""

import json
import urllib.request

import harness
from harness import BUILD, KVASIR, TINY, SystemTest

HUB = BUILD / "bin" / "kvasir-hub"


class Hub(harness.Process):
    def __init__(self, folder, port=0, extra=()):
        self.data = folder / "hub"
        self.models = folder / "models"
        self.models.mkdir(exist_ok=True)
        link = self.models / "tiny.gguf"
        if not link.exists():
            link.symlink_to(TINY)
        super().__init__([HUB, "--data", self.data, "--models", self.models, "--listen", f"127.0.0.1:{port}", *extra])
        self.url = self.next_line(r"^http://")
        self.port = int(self.url.rsplit(":", 1)[1])

    @staticmethod
    def token(folder, scope):
        return harness.run([HUB, "token", "create", "--data", folder / "hub", "--scope", scope]).stdout.strip()


def ask(url, token, path, body=None):
    request = urllib.request.Request(url + path, data=None if body is None else json.dumps(body).encode(),
                                     headers={"Authorization": f"Bearer {token}"})
    with urllib.request.urlopen(request, timeout=20) as answer:
        return json.load(answer)


class Swarm(SystemTest):
    def setUp(self):
        super().setUp()
        self.worker_token = Hub.token(self.folder, "worker")
        self.backbone_token = Hub.token(self.folder, "backbone")

    def hub(self, **kwargs):
        return self.start(Hub(self.folder, **kwargs))

    def join(self, hub, name, memory, *extra, prefix=()):
        args = [*prefix, KVASIR, "join", hub.url, "--memory", memory, "--threads", 1, "--data", self.folder / name,
                "--cache", self.folder / name / "slices", *extra]
        return self.start(harness.Process(args, env=harness.clean_environment(KVASIR_TOKEN=self.worker_token)))

    def demand(self, hub):
        return ask(hub.url, self.backbone_token, "/api/expert-demand?model=tiny")["segments"]

    def covered(self, hub):
        """Held, not only promised."""
        return all(s["replicas"] - s["reserved"] >= s["target"] for s in self.demand(hub))

    def links(self, hub):
        return [w["url"] for w in ask(hub.url, self.backbone_token, "/api/expert-routes?model=tiny")["workers"]]
