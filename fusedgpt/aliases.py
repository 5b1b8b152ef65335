"""What other tools and people call our settings and their values, for messages that name ours."""

from collections.abc import Container

# {setting: what it is called elsewhere}; a setting may be given with the value that the other name means
NAMES = {
    "learning_rate": "lr max_lr peak_lr",
    "max_iters": "epochs num_epochs num_train_epochs steps max_steps num_steps train_steps iters iterations",
    "n_layer": "layers n_layers num_layers num_hidden_layers depth",
    "n_head": "heads n_heads num_heads num_attention_heads",
    "n_embd": "hidden_size d_model dim width n_embed embed_dim embedding_size hidden_dim",
    "n_kv_head": "num_key_value_heads num_kv_heads n_kv_heads kv_heads num_query_groups n_query_groups",
    "head_size": "head_dim d_head d_kv kv_channels",
    "n_inner": "intermediate_size ffn_dim ffn_hidden_size d_ff d_ffn n_ff mlp_dim ffn_size",
    "position=rotary": "rope rotary use_rope use_rotary",
    "rope_theta": "rope_base rotary_base rotary_emb_base rope_freq_base theta",
    "norm=rmsnorm": "rmsnorm rms_norm use_rmsnorm",
    "norm_eps": "rms_norm_eps layer_norm_eps layer_norm_epsilon rms_eps eps",
    "mlp=swiglu": "swiglu glu use_swiglu",
    "activation": "hidden_act activation_function hidden_activation act_fn",
    "window": "sliding_window sliding_window_size window_size local_window attention_window",
    "tie_embeddings": "tie_word_embeddings tie_weights tied_embeddings weight_tying share_embeddings",
    "max_new_tokens": "max_length length n_tokens max_tokens num_tokens n_predict",
    "block_size": "context context_length ctx n_ctx n_positions seq_len seq_length max_seq_len max_length",
    "batch_size": "bs bsz batch micro_batch_size device_batch_size per_device_train_batch_size",
    "gradient_accumulation_steps": "accum accumulation grad_accum grad_accum_steps accumulate_grad_batches",
    "eval_interval": "eval_every eval_steps save_every save_steps save_interval checkpoint_every",
    "log_interval": "log_every logging_steps print_every",
    "warmup_iters": "warmup warmup_steps",
    "grad_clip": "clip clip_grad max_grad_norm gradient_clip_val",
    "schedule": "scheduler lr_scheduler lr_scheduler_type",
    "optimizer": "optim",
    "weight_decay": "wd",
    "dtype=float16": "fp16 half",
    "dtype=bfloat16": "bf16",
    "dtype": "precision mixed_precision amp torch_dtype",
    "device=cuda": "gpu cuda use_cuda",
    "device=cpu": "cpu use_cpu no_cuda",
    "init_from=resume": "resume resume_from_checkpoint resume_from",
    "init_from": "model model_name model_name_or_path pretrained",
    "out_dir": "output output_dir out save_dir run run_dir checkpoint ckpt",
    "dataset": "data data_dir data_path train_file train_data corpus",
    "attention": "kernel attn attn_implementation flash_attention flash",
    "start": "prompt text",
    "temperature": "temp t",
    "num_samples": "n samples num_return_sequences",
    "seed": "random_seed",
}
# the number of GPUs or processes, which is no setting: torchrun takes it
PROCESSES = "gpus num_gpus n_gpus ngpu ngpus devices num_devices nproc nproc_per_node num_processes world_size"
# {what people write: the value that it means}
VALUES = {"fp16": "float16", "half": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}
VALUES |= {"adam": "adamw", "1": "True", "yes": "True", "on": "True", "0": "False", "no": "False", "off": "False"}


def settings_called(name: str, allowed: Container[str]) -> list[str]:
    """The settings among `allowed` that other tools call `name`, some with a value, as in dtype=float16."""
    without = name.removeprefix("no_")
    if without != name and without in allowed:
        return [f"{without}=False"]
    found = [setting for setting, others in NAMES.items() if name.lower() in others.split()]
    return [setting for setting in found if setting.partition("=")[0] in allowed]
