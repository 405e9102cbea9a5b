"""lm-eval's local-completions against a server, by the package's own Python: prints samples and results of the tasks beside it, as JSON.

    run.py http://127.0.0.1:8000/v1/completions needle PREFIX_TOKEN BATCH_SIZE
"""
import json
import pathlib
import sys

import lm_eval
from lm_eval.tasks import TaskManager


def main():
    url, model, prefix, batch_size = sys.argv[1:]
    tasks = ["winnow_facts", "winnow_story", "winnow_words"]
    out = lm_eval.simple_evaluate(
        model="local-completions", tasks=tasks, batch_size=int(batch_size), bootstrap_iters=0,
        model_args={"model": model, "base_url": url, "tokenizer_backend": "remote", "custom_prefix_token_id": int(prefix),
                    "eos_string": "<|endoftext|>", "max_length": 1024},
        task_manager=TaskManager(include_path=str(pathlib.Path(__file__).parent), include_defaults=False))
    samples = {task: [{"doc": s["doc"], "resps": s["resps"], "filtered_resps": s["filtered_resps"]} for s in out["samples"][task]] for task in tasks}
    print(json.dumps({"version": lm_eval.__version__, "results": out["results"], "samples": samples}, default=str))


if __name__ == "__main__":
    main()
