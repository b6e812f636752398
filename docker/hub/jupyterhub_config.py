"""A class's JupyterHub, as compose.yaml starts it; all that varies comes from the environment."""

import os
import sys

import docker
import seats
from codes import Codes, class_secret

c = get_config()  # noqa: F821  # JupyterHub runs this file with that name in it

CLASS = os.environ["RDMALAB_CLASS"]
IDLE_S, AGE_S = int(os.environ["RDMALAB_IDLE_S"]), int(os.environ["RDMALAB_AGE_S"])
LOOK_S = max(5, min(300, IDLE_S // 4))  # how often it is asked who is at work

# --- who may come in
c.JupyterHub.authenticator_class = Codes
c.Codes.secret = class_secret()
c.Codes.allow_all = True  # whoever has a code

# --- where hub and proxy are: learners' servers know the hub by its name on their network
c.JupyterHub.bind_url = "http://0.0.0.0:8000"
c.JupyterHub.hub_ip = "0.0.0.0"
c.JupyterHub.hub_connect_ip = seats.HUB
c.JupyterHub.db_url = "sqlite:////srv/hub/jupyterhub.sqlite"
c.JupyterHub.cookie_secret_file = "/srv/hub/cookie.secret"
c.ConfigurableHTTPProxy.pid_file = "/tmp/proxy.pid"

# --- a learner's server: no right, no outside, a share of this machine
c.JupyterHub.spawner_class = seats.Seat
c.Seat.class_id = CLASS
c.Seat.subnets = os.environ["RDMALAB_SUBNETS"]
c.Seat.image = os.environ["RDMALAB_IMAGE"]
c.Seat.pull_policy = "never"  # a class must not depend on a registry
c.Seat.prefix = CLASS
c.Seat.cmd = ["jupyterhub-singleuser"]
c.Seat.notebook_dir = "/work"
c.Seat.default_url = "/lab"
c.Seat.environment = {
    "RDMALAB_SHARED_DIR": "/share:/opt/rdmalab/share",
    "JUPYTERHUB_ACTIVITY_INTERVAL": str(LOOK_S),
}
c.Seat.volumes = {f"{CLASS}-work-{{username}}": "/work"}
c.Seat.read_only_volumes = {f"{CLASS}-starts": "/share"}
c.Seat.remove = True
c.Seat.post_stop_hook = seats.leave
c.Seat.use_internal_ip = True
c.Seat.mem_limit = os.environ["RDMALAB_MEMORY"]
c.Seat.cpu_limit = float(os.environ["RDMALAB_CPUS"])
c.Seat.start_timeout = 300
c.Seat.http_timeout = 180  # all start at once
c.Seat.extra_create_kwargs = {"labels": {seats.LABEL: CLASS}, "user": "1000:0"}
c.Seat.extra_host_config = {
    "read_only": True,
    "cap_drop": ["ALL"],
    "security_opt": ["no-new-privileges"],
    "pids_limit": 1024,
    "memswap_limit": os.environ["RDMALAB_MEMORY"],
    "tmpfs": {"/tmp": "size=256m,mode=1777"},
}
c.JupyterHub.concurrent_spawn_limit = 40  # a class arrives at once; the next are told to wait

# --- who is gone makes room
c.JupyterHub.load_roles = [
    {
        "name": "culler",
        "scopes": ["list:users", "read:users:activity", "read:servers", "delete:servers"],
        "services": ["culler"],
    }
]
cull = [sys.executable, "-m", "jupyterhub_idle_culler", f"--timeout={IDLE_S}"]
cull += [f"--max-age={AGE_S}", f"--cull-every={LOOK_S}"]
c.JupyterHub.last_activity_interval = LOOK_S
c.JupyterHub.services = [{"name": "culler", "command": cull}]

# `docker compose down` is the end of the class: servers first. After a crash they run on.
c.JupyterHub.cleanup_servers = True
seats.rejoin(docker.APIClient(version="auto"), CLASS)
