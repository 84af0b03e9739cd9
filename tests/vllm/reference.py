"""What transformers says of a sequence: `reference.py MODEL_FOLDER < ids.json > answer.npz`, run by the Python that has it.

experts: int64 [tokens, layers, k], the likeliest first; row t is of token t as input. logprobs: float32
[tokens, vocabulary]; row t is of what follows token t.
"""

# pyright: reportMissingImports=false
# It runs outside the project's environment.

import json
import sys

import numpy as np
import torch
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
k = model.config.num_experts_per_tok
with torch.no_grad():
    answer = model(torch.tensor([json.load(sys.stdin)]), output_router_logits=True)
experts = [layer.reshape(-1, layer.shape[-1]).topk(k).indices for layer in answer.router_logits]
np.savez(
    sys.stdout.buffer,
    experts=torch.stack(experts, 1).numpy(),
    logprobs=answer.logits[0].log_softmax(-1).numpy(),
)
