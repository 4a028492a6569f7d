"""A streamed model of transformers answers what the stock one answers, bit by bit; what cannot be streamed says why."""

from __future__ import annotations

import copy
import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from safetensors.torch import load_file, save_file
from support.streamed_transformers import (
    ARCHITECTURES,
    answers_of,
    assert_same_answers,
    change_config,
    fingerprint,
    inputs_of,
    new_model,
    save,
    with_odd_header,
)
from transformers import (
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    GPT2Config,
    LlamaForCausalLM,
    NomicBertConfig,
    PreTrainedConfig,
    PreTrainedModel,
)

import fastpersist as fp
from fastpersist.integrations.huggingface_streaming import from_pretrained

# A budget that leaves no room for all weights of a tiny model, and one that does.
LITTLE, AMPLE = "little", "64MiB"


@pytest.fixture(autouse=True)
def _small_units(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let tiny models have many units, and embeddings of which rows are read."""
    from fastpersist.streaming import stream

    monkeypatch.setattr(stream, "_UNIT_BYTES_MIN", 64 << 10)
    monkeypatch.setattr(stream, "_SMALL_BYTES", 16 << 10)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """Return a function that makes the directory of a model; nothing may be written to it."""
    made: dict[tuple[object, ...], Path] = {}

    def make(name: str, dtype: torch.dtype = torch.float32, *, shards: bool = False) -> Path:
        key = name, dtype, shards
        if key not in made:
            made[key] = save(new_model(name, dtype), tmp_path_factory.mktemp(name), shards=shards)
        return made[key]

    return make


def stock(directory: Path, name: str, **options: Any) -> Any:
    return ARCHITECTURES[name][1].from_pretrained(directory, **options)


def streamed(directory: Path, name: str, budget_bytes: int | str = AMPLE, **options: Any) -> Any:
    if budget_bytes == LITTLE:
        files_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        budget_bytes = files_bytes * 7 // 10
    return from_pretrained(directory, auto_class=ARCHITECTURES[name][1], budget_bytes=budget_bytes, **options)


# ------------------------------------------------------------------------------------------- the same answers


@pytest.mark.parametrize(("budget_bytes", "shards"), [(LITTLE, True), (LITTLE, False), (AMPLE, True)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_logits_and_greedy_tokens_are_those_of_the_stock_model(
    name: str, dtype: torch.dtype, budget_bytes: str, shards: bool, checkpoint: Callable[..., Path]
) -> None:
    directory = checkpoint(name, dtype, shards=shards)
    before = fingerprint(directory)
    model = streamed(directory, name, budget_bytes)
    assert_same_answers(model, stock(directory, name))
    assert (model.dtype, model.device, model.training) == (dtype, torch.device("cpu"), False)
    stats = model.weight_stream.stats()
    if budget_bytes == AMPLE:
        assert stats.resident_unit_count == stats.unit_count
        assert stats.read_bytes < 1.5 * stats.weight_bytes
    else:
        assert 0 < stats.streamed_bytes
        assert stats.ring_bytes + stats.resident_bytes <= stats.budget_bytes < stats.weight_bytes
    model.weight_stream.close()
    assert fingerprint(directory) == before


def test_a_model_of_some_size_is_streamed_layer_by_layer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # units as large as they are for users
    sizes = {"hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 6, "vocab_size": 4096}
    directory = save(new_model("llama", torch.bfloat16, **sizes), tmp_path / "model", shards=True)
    model = streamed(directory, "llama", "24MiB")
    assert_same_answers(model, stock(directory, "llama"))
    stats = model.weight_stream.stats()
    assert stats.unit_count >= 8
    assert stats.streamed_bytes > 0
    model.weight_stream.close()


def test_engine_and_verify_are_those_of_the_stream(tmp_path: Path) -> None:
    directory = save(new_model("llama"), tmp_path / "model")
    weights = load_file(directory / "model.safetensors")
    fp.save(weights, directory / "model.safetensors")  # with checksums
    model = streamed(directory, "llama", verify=True, engine="threads")
    assert model.weight_stream.stats().engine.startswith("threads")
    assert_same_answers(model, stock(directory, "llama"))
    model.weight_stream.close()
    (place,) = (each for each in fp.inspect(directory / "model.safetensors").tensors if each.name == "lm_head.weight")
    with open(directory / "model.safetensors", "r+b") as file:
        file.seek(place.offset_bytes)
        file.write(b"\x01\x02\x03")
    model = streamed(directory, "llama", verify=True)
    with pytest.raises(fp.ChecksumError, match=r"lm_head\.weight"):
        answers_of(model)
    model.weight_stream.close()
    with pytest.raises(fp.ConfigError, match="turbo"):
        streamed(directory, "llama", engine="turbo")


@pytest.mark.parametrize("name", ["llama", "mixtral", "t5"])
def test_a_file_with_a_header_of_odd_length_is_read_as_it_is(name: str, tmp_path: Path) -> None:
    directory = save(new_model(name), tmp_path / "model")
    expected = answers_of(stock(directory, name))
    with_odd_header(directory / "model.safetensors")
    model = streamed(directory, name, LITTLE)
    assert all(map(torch.equal, answers_of(model), expected))
    model.weight_stream.close()


@pytest.mark.parametrize(
    ("name", "saved", "wanted"),
    [
        ("llama", torch.float32, torch.bfloat16),
        ("llama", torch.bfloat16, "float32"),
        ("mixtral", torch.float32, torch.bfloat16),
        ("t5", torch.bfloat16, torch.float16),  # of which transformers keeps a part in float32
    ],
)
def test_a_dtype_converts_as_transformers_does(
    name: str, saved: torch.dtype, wanted: torch.dtype | str, checkpoint: Callable[..., Path]
) -> None:
    directory = checkpoint(name, saved)
    theirs = stock(directory, name, dtype=wanted)
    model = streamed(directory, name, AMPLE, dtype=wanted)
    assert {name: each.dtype for name, each in model.named_parameters()} == {
        name: each.dtype for name, each in theirs.named_parameters()
    }
    assert_same_answers(model, theirs)
    model.weight_stream.close()


def test_the_dtype_is_that_of_the_configuration_or_else_that_of_the_file(tmp_path: Path) -> None:
    directory = save(new_model("llama", torch.bfloat16), tmp_path / "model")
    change_config(directory, dtype="float32")
    assert streamed(directory, "llama").dtype == torch.float32 == stock(directory, "llama").dtype
    change_config(directory, dtype=None)
    assert streamed(directory, "llama").dtype == torch.bfloat16 == stock(directory, "llama").dtype


def test_the_configuration_can_be_changed_as_in_transformers(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    changes = {"num_hidden_layers": 2, "attn_implementation": "eager"}
    model = streamed(directory, "llama", **changes)
    assert len(model.model.layers) == 2
    assert model.config._attn_implementation == "eager"
    assert_same_answers(model, stock(directory, "llama", **changes))
    model.weight_stream.close()
    with pytest.raises(TypeError, match="hidden_sice"):
        streamed(directory, "llama", hidden_sice=3)


def test_a_model_is_found_with_and_without_the_prefix_of_its_base(tmp_path: Path) -> None:
    head = new_model("llama", tie_word_embeddings=True)
    with_head, without = save(head, tmp_path / "head"), save(head.model, tmp_path / "base")
    for directory, auto_class in (
        (with_head, AutoModel),
        (without, AutoModelForCausalLM),
        (with_head, LlamaForCausalLM),
    ):
        model = from_pretrained(directory, auto_class=auto_class, budget_bytes=AMPLE)
        assert_same_answers(model, auto_class.from_pretrained(directory))
        assert model.name_or_path == model.config.name_or_path == str(directory)  # what an adapter calls its base
        model.weight_stream.close()


def test_weights_that_the_configuration_ties_but_the_file_has_apart_stay_apart(tmp_path: Path) -> None:
    directory = save(new_model("llama", tie_word_embeddings=False), tmp_path / "model")
    change_config(directory, tie_word_embeddings=True)
    model = streamed(directory, "llama", LITTLE)
    assert_same_answers(model, stock(directory, "llama"))
    model.weight_stream.close()


# ------------------------------------------------------------------------------------------- use


def test_it_generates_after_an_exception_inside_of_a_forward(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama", shards=True)
    model = streamed(directory, "llama", LITTLE)

    def fail(*arguments: object) -> None:
        raise KeyboardInterrupt

    hook = model.model.layers[2].mlp.up_proj.register_forward_pre_hook(fail)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            model.generate(**inputs_of(model), max_new_tokens=2)
    hook.remove()
    assert_same_answers(model, stock(directory, "llama"))
    model.weight_stream.close()


def test_generate_has_the_configuration_of_the_directory_and_does_not_compile(tmp_path: Path) -> None:
    model = new_model("llama")
    model.generation_config.repetition_penalty = 1.5
    directory = save(model, tmp_path / "model")
    ours = streamed(directory, "llama")
    assert ours.generation_config.repetition_penalty == 1.5
    assert ours.generation_config.disable_compile
    assert_same_answers(ours, stock(directory, "llama"))
    (directory / "generation_config.json").unlink()  # older checkpoints have none
    change_config(directory, repetition_penalty=1.7)
    assert streamed(directory, "llama").generation_config.repetition_penalty == 1.7


def test_a_forward_without_no_grad_needs_no_gradients(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    model = streamed(directory, "llama", LITTLE)
    logits = model(**inputs_of(model)).logits
    assert not logits.requires_grad
    assert torch.equal(logits, stock(directory, "llama")(**inputs_of(model)).logits)
    model.weight_stream.close()


def test_no_hooks_of_accelerate_are_put_on_the_model(checkpoint: Callable[..., Path]) -> None:
    model = streamed(checkpoint("t5"), "t5")
    answers_of(model)  # generate puts one on the encoder of a model that has hf_device_map
    assert not [name for name, module in model.named_modules() if hasattr(module, "_hf_hook")]
    model.weight_stream.close()


def test_a_pipeline_takes_the_model(checkpoint: Callable[..., Path]) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast, pipeline

    words = Tokenizer(models.WordLevel({f"w{number}": number for number in range(512)}, unk_token="w0"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", pad_token="w0")
    directory = checkpoint("llama")
    texts = []
    for model in (streamed(directory, "llama", LITTLE), stock(directory, "llama")):
        run = pipeline("text-generation", model=model, tokenizer=tokenizer)
        texts.append(run("w5 w6 w7", max_new_tokens=5, do_sample=False))
    assert texts[0] == texts[1]


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_of_peft_are_attached_to_a_streamed_model(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    directory = checkpoint("llama")
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", init_lora_weights=False
    )
    trained = peft.get_peft_model(stock(directory, "llama"), config).eval()
    trained.save_pretrained(tmp_path / "adapter")
    model = streamed(directory, "llama", LITTLE)
    adapted = peft.PeftModel.from_pretrained(model, tmp_path / "adapter").eval()
    inputs = inputs_of(model)
    with torch.no_grad():
        assert torch.equal(adapted(**inputs).logits, trained(**inputs).logits)
    tokens = {"max_new_tokens": 5, "do_sample": False}
    assert torch.equal(adapted.generate(**inputs, **tokens), trained.generate(**inputs, **tokens))
    with pytest.raises(fp.ConfigError, match="stay on disk"):
        adapted.merge_and_unload()
    model.weight_stream.close()


@pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing. is deprecated:FutureWarning")
def test_adapters_are_trained_over_a_streamed_model(checkpoint: Callable[..., Path]) -> None:
    peft = pytest.importorskip("peft")
    directory = checkpoint("llama", torch.bfloat16)
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "up_proj"], task_type="CAUSAL_LM")
    streamed_model = streamed(directory, "llama", LITTLE)
    found = []
    for base in (streamed_model, stock(directory, "llama")):
        torch.manual_seed(0)
        model = peft.get_peft_model(base, config)
        optimizer = torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1.0)
        for _ in range(3):
            loss = model(**inputs_of(base), labels=inputs_of(base)["input_ids"]).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trained = {name: each.detach().clone() for name, each in model.named_parameters() if "lora_" in name}
        found.append((loss.detach(), trained))
    (our_loss, ours), (their_loss, theirs) = found
    assert torch.equal(our_loss, their_loss)
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    streamed_model.weight_stream.close()


def test_a_closed_model_can_be_streamed_again(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("gpt2")
    model = streamed(directory, "gpt2", LITTLE)
    answers_of(model)
    model.weight_stream.close()
    with pytest.raises(fp.ConfigError, match="closed"):
        model(**inputs_of(model))
    again = streamed(directory, "gpt2", LITTLE)
    assert_same_answers(again, stock(directory, "gpt2"))
    again.weight_stream.close()


@pytest.mark.parametrize(
    "ways", [{"num_beams": 3}, {"cache_implementation": "static"}, {"do_sample": True, "top_k": 5}]
)
def test_other_ways_to_generate_give_the_same_tokens(ways: dict[str, Any], checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    model = streamed(directory, "llama", LITTLE)
    tokens = []
    for each in (model, stock(directory, "llama")):
        torch.manual_seed(0)
        tokens.append(each.generate(**inputs_of(model), max_new_tokens=6, min_new_tokens=6, **ways))
    assert torch.equal(*tokens)
    model.weight_stream.close()


def test_what_needs_all_weights_at_once_is_refused(checkpoint: Callable[..., Path], tmp_path: Path) -> None:
    model = streamed(checkpoint("llama"), "llama", LITTLE)
    expected = answers_of(model)
    for use in (
        lambda: model.save_pretrained(tmp_path / "copy"),
        lambda: copy.deepcopy(model),
        lambda: model.to(torch.bfloat16),
        lambda: model.resize_token_embeddings(600),
    ):
        with pytest.raises(fp.ConfigError, match=r"on disk|streamed"):
            use()
    assert not list(tmp_path.rglob("*.safetensors"))
    assert all(map(torch.equal, answers_of(model), expected))
    model.weight_stream.close()


# ------------------------------------------------------------------------------------------- budget and device


def test_max_memory_of_the_device_is_the_budget(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    for given, expected in (({"cpu": "3MiB", 0: "1GiB"}, 3 << 20), ({"cpu": 4_000_000}, 4_000_000)):
        for device_map in ("cpu", torch.device("cpu"), {"": "cpu"}):
            model = from_pretrained(directory, device_map=device_map, max_memory=given)
            assert model.weight_stream.stats().budget_bytes == expected
            model.weight_stream.close()
    with pytest.raises(fp.ConfigError, match=r"no entry for cpu.*\[0\]"):
        from_pretrained(directory, max_memory={0: "1GiB"})
    with pytest.raises(fp.ConfigError, match="pass one of them"):
        from_pretrained(directory, max_memory={"cpu": "1GiB"}, budget_bytes="1GiB")
    with pytest.raises(fp.ConfigError, match="needs at least"):
        from_pretrained(directory, budget_bytes=4096)


def test_a_device_map_of_anything_but_one_device_is_refused(checkpoint: Callable[..., Path]) -> None:
    directory = checkpoint("llama")
    with pytest.raises(fp.UnsupportedError, match="one device, and device_map has 2"):
        from_pretrained(directory, device_map={"model": "cpu", "lm_head": "cuda:0"})
    for wrong in ("disk", "balanced", None, 1.5):
        with pytest.raises(fp.ConfigError, match="device_map is the device"):
            from_pretrained(directory, device_map=wrong)
    with pytest.raises(fp.ConfigError, match="dtype is 'auto' or"):
        from_pretrained(directory, dtype=torch.int8)


# ------------------------------------------------------------------------------------------- what is wrong


def test_what_is_no_directory_of_safetensors_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(fp.CheckpointNotFoundError, match="snapshot_download"):
        from_pretrained("meta-llama/Llama-3")
    with pytest.raises(fp.CheckpointNotFoundError, match=r"no config\.json"):
        from_pretrained(tmp_path)
    directory = save(new_model("llama"), tmp_path / "model")
    torch.save({}, directory / "pytorch_model.bin")
    (directory / "model.safetensors").unlink()
    with pytest.raises(fp.CheckpointNotFoundError, match=r"no model\.safetensors .*save_pretrained"):
        from_pretrained(directory)
    (directory / "model.safetensors.index.json").write_text("{}")
    with pytest.raises(fp.UnsupportedError, match="no index of safetensors"):
        from_pretrained(directory)
    (directory / "adapter_config.json").write_text("{}")
    with pytest.raises(fp.UnsupportedError, match="stream the base model"):
        from_pretrained(directory)


def test_everything_wrong_with_the_files_is_told_at_once(tmp_path: Path) -> None:
    directory = save(new_model("llama"), tmp_path / "model", shards=True)
    index = json.loads((directory / "model.safetensors.index.json").read_text())["weight_map"]
    first, last = index["model.embed_tokens.weight"], index["model.norm.weight"]
    assert first != last
    (directory / first).unlink()
    (directory / last).write_bytes((directory / last).read_bytes()[:-100])
    with pytest.raises(fp.FastPersistError) as caught:
        from_pretrained(directory)
    assert first in str(caught.value)
    assert last in str(caught.value)


def test_a_file_that_the_configuration_names_is_the_one_that_is_read(tmp_path: Path) -> None:
    directory = save(new_model("llama"), tmp_path / "model")
    other = save(new_model("llama", initializer_range=0.5), tmp_path / "other")
    (other / "model.safetensors").rename(directory / "other.safetensors")
    change_config(directory, transformers_weights="other.safetensors")
    model = streamed(directory, "llama")
    assert_same_answers(model, stock(directory, "llama"))
    model.weight_stream.close()


def test_a_parameter_that_the_checkpoint_lacks_is_named(tmp_path: Path) -> None:
    base = save(new_model("llama").model, tmp_path / "base")
    with pytest.raises(fp.ConfigError, match=r"no weights for lm_head\.weight of LlamaForCausalLM"):
        from_pretrained(base)


def test_a_shape_of_another_configuration_is_named(checkpoint: Callable[..., Path]) -> None:
    with pytest.raises(fp.ConfigError, match=r"layers\.0\.mlp\.down_proj\.weight has shape"):
        from_pretrained(checkpoint("llama"), intermediate_size=128)
    with pytest.raises(fp.ConfigError, match=r"experts\.gate_up_proj has shape"):
        from_pretrained(checkpoint("mixtral"), intermediate_size=128)


def test_tensors_without_a_place_are_told_in_the_log(
    checkpoint: Callable[..., Path], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "fastpersist")
    from_pretrained(checkpoint("llama"), auto_class=AutoModel).weight_stream.close()
    assert "1 tensors that LlamaModel does not use: lm_head.weight" in caplog.text


# ------------------------------------------------------------------------------------------- conversions


def test_a_weight_that_transformers_computes_is_refused_and_its_conversion_helps(tmp_path: Path) -> None:
    sizes = {
        "vocab_size": 64,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
    }
    torch.manual_seed(0)
    theirs = AutoModel.from_config(NomicBertConfig(**sizes)).eval()
    original = save(theirs, tmp_path / "original")
    expected = r"makes layers\.0\.self_attn\.q_proj\.weight from .*Wqkv\.weight by Chunk\(dim=0\).*save_original_format"
    with pytest.raises(fp.UnsupportedError, match=expected):
        from_pretrained(original, auto_class=AutoModel)
    converted = save(theirs, tmp_path / "converted", save_original_format=False)
    model = from_pretrained(converted, auto_class=AutoModel, budget_bytes=AMPLE)
    ids = torch.arange(3, 12)[None]
    with torch.no_grad():
        assert torch.equal(model(input_ids=ids).last_hidden_state, theirs(input_ids=ids).last_hidden_state)
    model.weight_stream.close()


class ScaledConfig(PreTrainedConfig):
    model_type = "scaled"


class ScaledModel(PreTrainedModel):
    """A model whose own parameters are fp8 and scales, and which has a buffer that no file has."""

    config_class = ScaledConfig
    main_input_name = "input_ids"

    def __init__(self, config: ScaledConfig) -> None:
        super().__init__(config)
        self.weight = torch.nn.Parameter(torch.zeros(16, 16).to(torch.float8_e4m3fn), requires_grad=False)
        self.scale = torch.nn.Parameter(torch.ones(16, 1, dtype=torch.float32))
        self.register_buffer("shift", torch.arange(16.0), persistent=False)
        self.post_init()

    def _init_weights(self, module: torch.nn.Module) -> None:
        if isinstance(module, ScaledModel) and getattr(self.config, "computes_shift", True):
            module.shift.copy_(torch.arange(16.0))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return inputs @ (self.weight.float() * self.scale).T + self.shift


def scaled_checkpoint(directory: Path, **config: Any) -> tuple[Path, ScaledModel]:
    torch.manual_seed(0)
    model = ScaledModel(ScaledConfig(**config))
    model.weight.data = torch.randn(16, 16).to(torch.float8_e4m3fn)
    model.scale.data = torch.rand(16, 1)
    directory.mkdir()
    model.config.save_pretrained(directory)
    save_file({"weight": model.weight.data, "scale": model.scale.data}, directory / "model.safetensors")
    return directory, model


def test_parameters_of_a_quantized_checkpoint_that_the_model_has_are_streamed_as_they_are(tmp_path: Path) -> None:
    directory, theirs = scaled_checkpoint(tmp_path / "model", quantization_config={"quant_method": "fp8"})
    model = from_pretrained(directory, auto_class=ScaledModel, budget_bytes=AMPLE)
    assert model.weight.dtype == torch.float8_e4m3fn
    inputs = torch.randn(3, 16)
    assert torch.equal(model(inputs), theirs(inputs))
    model.weight_stream.close()


def test_a_buffer_that_a_class_does_not_compute_is_named(tmp_path: Path) -> None:
    directory, _ = scaled_checkpoint(tmp_path / "model", computes_shift=False)
    with pytest.raises(fp.ConfigError, match="ScaledModel does not compute its buffer shift"):
        from_pretrained(directory, auto_class=ScaledModel)


@pytest.mark.parametrize("method", ["bitsandbytes", "fp8", "torchao"])
def test_formats_that_are_unpacked_after_loading_are_refused(method: str, tmp_path: Path) -> None:
    directory = save(new_model("llama"), tmp_path / "model")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = dict(new_model("llama").state_dict())
    if method == "bitsandbytes":
        tensors[name] = torch.zeros(tensors[name].numel() // 2, 1, dtype=torch.uint8)
        tensors[f"{name}.absmax"] = torch.ones(7)
    elif method == "fp8":
        tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    else:
        tensors[f"{name}:qdata"] = tensors.pop(name).to(torch.int8)
    save_file(tensors, directory / "model.safetensors")
    change_config(directory, quantization_config={"quant_method": method})
    with pytest.raises(fp.UnsupportedError, match=rf"quantized \({method}\).*up_proj.*load this one with transformers"):
        from_pretrained(directory)


def test_an_untied_model_of_another_class_is_refused_by_transformers_itself(tmp_path: Path) -> None:
    GPT2Config().save_pretrained(tmp_path)
    save_file({"a": torch.zeros(1)}, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="Unrecognized configuration class"):
        from_pretrained(tmp_path, auto_class=AutoModelForSeq2SeqLM)
