import json
import os
import subprocess
import sys

import pytest

CODE = """
import json, os, sys
from miles.ray.actor_process import enter
kept = os.dup(1)
enter("role-0", sys.argv[1], gpus=sys.argv[2:])
print("into the log", flush=True)
os.write(kept, json.dumps(os.environ["CUDA_VISIBLE_DEVICES"]).encode())
"""


@pytest.mark.parametrize("gpus", [[], ["1"], ["GPU-a", "GPU-b"]])
def test_an_actor_sees_its_gpus_alone_and_writes_into_its_log(tmp_path, gpus):
    env = {**os.environ, "CUDA_VISIBLE_DEVICES": "0,1,2,3"}
    done = subprocess.run(
        [sys.executable, "-c", CODE, str(tmp_path), *gpus], env=env, capture_output=True, text=True, check=True
    )
    assert json.loads(done.stdout) == ",".join(gpus)
    assert (tmp_path / "logs" / "role-0.log").read_text() == "into the log\n"
