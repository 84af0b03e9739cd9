"""TransferQueue's SimpleStorage, as its own performance test runs it: put and get through Ray actors' storage units, in memory.

Runs under the interpreter of `.venv-transferqueue` alone (`porter_peer`), and prints one JSON object: seconds of each round. Nothing
of packtrain is there.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time

os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")


def main() -> None:
    sequences, columns, length, window, cp, rounds = (int(each) for each in sys.argv[1:7])
    # What pyright does not find is in that interpreter alone.
    import ray
    import torch
    import transfer_queue as tq  # pyright: ignore[reportMissingImports]
    from omegaconf import OmegaConf  # pyright: ignore[reportMissingImports]
    from tensordict import TensorDict  # pyright: ignore[reportMissingImports]

    # Its logs, and those of Ray, are not the answer.
    with contextlib.redirect_stdout(sys.stderr):
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, configure_logging=False)
        storage = {"total_storage_size": sequences * (rounds + 1), "num_data_storage_units": 2}
        tq.init(OmegaConf.create({"backend": {"storage_backend": "SimpleStorage", "SimpleStorage": storage}}))
        names = [f"column_{i}" for i in range(columns)]
        fields = TensorDict({name: torch.randn(sequences, length) for name in names}, batch_size=(sequences,))
        keys = [f"key_{i}" for i in range(sequences)]
        some = keys[:window]
        taken: dict[str, list[float]] = {"put": [], "get": [], "column": [], "window": []}

        def timed(what: str, began: float) -> None:
            taken[what].append(time.perf_counter() - began)

        for number in range(rounds + 1):
            partition = f"p{number}"
            began = time.perf_counter()
            tq.kv_batch_put(keys=keys, partition_id=partition, fields=fields)
            timed("put", began)
            began = time.perf_counter()
            got = tq.kv_batch_get(keys=keys, partition_id=partition)
            timed("get", began)
            assert torch.equal(got["column_0"][7], fields["column_0"][7])
            del got
            began = time.perf_counter()
            tq.kv_batch_get(keys=keys, partition_id=partition, select_fields=["column_0"])
            timed("column", began)
            # It has no ranges of a row: a rank gets its sequences whole, and cuts its two chunks out of each.
            began = time.perf_counter()
            got = tq.kv_batch_get(keys=some, partition_id=partition)
            chunk = length // (2 * cp)
            cut = {
                name: [
                    torch.cat([row[r * chunk : (r + 1) * chunk] for r in (0, 2 * cp - 1)])
                    for row in got[name].unbind()
                ]
                for name in names
            }
            timed("window", began)
            del got, cut
            tq.kv_clear(keys=keys, partition_id=partition)
        tq.close()
        ray.shutdown()
    print(json.dumps({what: seconds[1:] for what, seconds in taken.items()}))


if __name__ == "__main__":
    main()
