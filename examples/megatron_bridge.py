"""Train a small Nemotron 3 Nano with Megatron-Bridge: graphs off, TransformerEngine's (TE's) graphs, te-graph-fixes.

    python examples/megatron_bridge.py                # in a NeMo container, on two GPUs
    python examples/megatron_bridge.py --check        # two more runs, under `te-graph-fixes run --check`

This program uses all options of the report TE #3051, but a smaller model, mock data and fewer ranks. As in the report,
the run with "graphs off" delays the capture beyond its last step. The program prints the loss and the gradient norm of
each step and the norms of `main_grad` by kind of parameter, and draws a picture. `megatron_lm.py` describes the exit
statuses.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Collection
from typing import Any

from megatron_rank import prepare, watch
from megatron_runs import WARMUP, Training, add_arguments, run_and_report

AS_RANK = "--as-a-rank"
NEVER = 1000
"""A number of warmup steps that the training does not reach, so it captures no graphs."""
SMALL = {
    "hybrid_layer_pattern": "MEM*EMEM*E",
    "num_layers": 10,
    "hidden_size": 512,
    "ffn_hidden_size": 1024,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "kv_channels": 128,
    "mamba_num_heads": 16,
    "mamba_head_dim": 64,
    "mamba_state_dim": 128,
    "mamba_num_groups": 8,
    "num_moe_experts": 8,
    "moe_router_topk": 2,
    "moe_ffn_hidden_size": 512,
    "moe_shared_expert_intermediate_size": 1024,
}
SEQUENCE = 512


def main() -> int:
    if sys.argv[1:2] == [AS_RANK]:
        be_rank(int(sys.argv[2]), int(sys.argv[3]), graphs=sys.argv[4:] == ["graphs"])
        return 0
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser, "megatron-bridge")
    options = parser.parse_args()
    program = [__file__, AS_RANK, str(options.iterations), str(options.gpus)]
    training = Training("Nemotron 3 Nano, small", program, ["graphs"], options.out.resolve(), options.gpus)
    return run_and_report(training, options)


def be_rank(iterations: int, gpus: int, graphs: bool) -> None:
    """Train on this rank, and print norms of gradients in every fourth step from the first replay on."""
    prepare()
    from megatron.bridge.training.callbacks import Callback
    from megatron.bridge.training.gpt_step import forward_step
    from megatron.bridge.training.pretrain import pretrain

    class Watch(Callback):
        def on_train_start(self, context: Any) -> None:
            watch(context.model, context.optimizer, steps(iterations))

    pretrain(config=config(iterations, gpus, graphs), forward_step_func=forward_step, callbacks=[Watch()])


def steps(iterations: int) -> Collection[int]:
    return range(WARMUP + 1, iterations + 1, 4)


def config(iterations: int, gpus: int, graphs: bool) -> Any:
    """Return the recipe with the options of the report, but for a small model, mock data and deterministic mode."""
    from megatron.bridge.recipes.nemotronh.nemotron_3_nano import nemotron_3_nano_pretrain_config
    from megatron.bridge.training.mixed_precision import MixedPrecisionConfig
    from megatron.core.transformer.enums import AttnBackend

    config = nemotron_3_nano_pretrain_config()
    model = config.model
    # the options of the report
    model.tensor_model_parallel_size = model.expert_tensor_parallel_size = model.pipeline_model_parallel_size = 1
    model.expert_model_parallel_size = gpus
    model.sequence_parallel = False
    model.moe_token_dispatcher_type = "alltoall"
    model.moe_expert_capacity_factor = 1.0
    model.moe_token_drop_policy = "probs"
    model.moe_pad_expert_input_to_capacity = True
    model.cuda_graph_impl = "transformer_engine"
    model.cuda_graph_scope = ["mamba", "attn", "moe"]
    model.cuda_graph_warmup_steps = WARMUP if graphs else NEVER
    model.use_te_rng_tracker = True
    config.mixed_precision = MixedPrecisionConfig(
        bf16=True,
        fp8="hybrid",
        fp8_recipe="tensorwise",
        fp8_wgrad=True,
        fp8_dot_product_attention=False,
        fp8_multi_head_attention=False,
    )
    # a small model
    for name, value in SMALL.items():
        setattr(model, name, value)
    model.seq_length = config.dataset.seq_length = SEQUENCE
    config.train.train_iters = iterations
    config.train.global_batch_size, config.train.micro_batch_size = 4 * gpus, 1
    config.scheduler.lr_warmup_iters = 0
    config.optimizer.lr, config.optimizer.min_lr = 1e-3, 1e-5
    # mock data, no checkpoints, a log line for each step
    config.tokenizer.tokenizer_type, config.tokenizer.tokenizer_model = "NullTokenizer", None
    config.tokenizer.vocab_size = 1024
    config.dataset.num_workers, config.dataset.path_to_cache = 0, None
    config.validation.eval_iters = 0
    config.checkpoint.save = config.checkpoint.load = None
    config.logger.log_interval, config.logger.tensorboard_dir = 1, None
    config.logger.log_timers_to_tensorboard = False
    config.dist.distributed_timeout_minutes = 3
    # deterministic mode, so that runs can be compared digit by digit
    model.deterministic_mode, model.attention_backend = True, AttnBackend.unfused
    model.cross_entropy_loss_fusion = model.use_mamba_mem_eff_path = False
    return config


if __name__ == "__main__":
    sys.exit(main())
