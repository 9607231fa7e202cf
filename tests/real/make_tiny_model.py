#!/usr/bin/env python3
"""Write a tiny Llama model folder that needs no download.

usage: make_tiny_model.py OUT_DIR [--weights] [--layers 2] [--hidden 64]

By default only config + tokenizer are written: serve with --load-format dummy.
With --weights a real (random) model.safetensors is written as well, so that
the servers' genuine weight loading path runs too (needs numpy + safetensors).
Needs the `tokenizers` package; nothing here touches the network.
"""

import argparse
import json
import pathlib


def build_tokenizer(path: pathlib.Path) -> int:
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    specials = ["<unk>", "<s>", "</s>"]
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["Ġ" + w for w in ("the", "a", "is", "hello", "world", "one", "two")]
    vocab = {tok: i for i, tok in enumerate(specials + alphabet)}
    merges = []
    for word in words:
        left = word[0]
        for ch in word[1:]:
            merged = left + ch
            if (left, ch) not in merges:
                merges.append((left, ch))
            vocab.setdefault(merged, len(vocab))
            left = merged
    tok = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>"))
    tok.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tok.decoder = decoders.ByteLevel()
    tok.add_special_tokens(specials)
    tok.save(str(path / "tokenizer.json"))
    return tok.get_vocab_size()


def main() -> None:
    ap = argparse.ArgumentParser()
    ap.add_argument("out", type=pathlib.Path)
    ap.add_argument("--layers", type=int, default=2)
    ap.add_argument("--hidden", type=int, default=64)
    ap.add_argument("--heads", type=int, default=2)
    ap.add_argument(
        "--arch",
        choices=["llama", "gpt2"],
        default="llama",
        help="gpt2 has no rotary embedding: runs on SGLang's plain CPU path",
    )
    ap.add_argument("--positions", type=int, help="how long a text may be (4096; gpt2: 512)")
    ap.add_argument("--weights", action="store_true")
    ap.add_argument("--seed", type=int, default=0)
    args = ap.parse_args()
    out = args.out
    out.mkdir(parents=True, exist_ok=True)

    vocab = build_tokenizer(out)
    vocab = (vocab + 63) // 64 * 64  # keep it divisible for TP shards
    head_dim = args.hidden // args.heads
    inter = args.hidden * 2
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": inter,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.heads,
        "head_dim": head_dim,
        "vocab_size": vocab,
        "max_position_embeddings": args.positions or 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }
    if args.arch == "gpt2":
        if args.weights:
            ap.error("--weights is for llama only")
        config = {
            "architectures": ["GPT2LMHeadModel"],
            "model_type": "gpt2",
            "n_embd": args.hidden,
            "n_layer": args.layers,
            "n_head": args.heads,
            "n_inner": inter,
            "n_positions": args.positions or 512,
            "n_ctx": args.positions or 512,
            "vocab_size": vocab,
            "activation_function": "gelu_new",
            "layer_norm_epsilon": 1e-5,
            "tie_word_embeddings": True,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "torch_dtype": "bfloat16",
        }
    template = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}assistant:"
    tok_config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": 512,
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
        "chat_template": template,
    }

    def write(name, obj):
        return (out / name).write_text(json.dumps(obj, indent=1) + "\n")

    write("config.json", config)
    write("tokenizer_config.json", tok_config)
    write("generation_config.json", {"bos_token_id": 1, "eos_token_id": 2})

    if args.weights:
        import numpy as np
        from safetensors.numpy import save_file

        rng = np.random.default_rng(args.seed)
        h = args.hidden

        def rand(*shape):
            return (rng.standard_normal(shape) * 0.05).astype(np.float16)

        def ones(n):
            return np.ones(n, np.float16)

        t = {
            "model.embed_tokens.weight": rand(vocab, h),
            "lm_head.weight": rand(vocab, h),
            "model.norm.weight": ones(h),
        }
        for i in range(args.layers):
            p = f"model.layers.{i}."
            t[p + "input_layernorm.weight"] = ones(h)
            t[p + "post_attention_layernorm.weight"] = ones(h)
            for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
                t[p + f"self_attn.{name}.weight"] = rand(h, h)
            t[p + "mlp.gate_proj.weight"] = rand(inter, h)
            t[p + "mlp.up_proj.weight"] = rand(inter, h)
            t[p + "mlp.down_proj.weight"] = rand(h, inter)
        save_file(t, str(out / "model.safetensors"), metadata={"format": "pt"})
    print(
        f"{out}: vocab {vocab}, layers {args.layers}, hidden {args.hidden}, "
        f"weights {'safetensors' if args.weights else 'none (use --load-format dummy)'}"
    )


if __name__ == "__main__":
    main()
