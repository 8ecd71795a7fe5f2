"""Settings of the rollout engine `vllm`. Importable without torch."""

from __future__ import annotations

from typing import Annotated, Literal, Self
from urllib.parse import urlsplit

from pydantic import Field, model_validator

from rft_core.settings import NOT_BLANK, Settings, execution

# What decides how our own server is started, and has no effect on servers that run already.
OF_MANAGED_SERVER = ("python", "arguments", "gpu_memory_utilization", "cpu_cache_gib", "start_timeout_seconds")
# Arguments that the engine gives itself; another value would serve other weights or tell other logprobs.
RESERVED_ARGUMENTS = frozenset(
    {
        "--api-key",
        "--dtype",
        "--enable-lora",
        "--generation-config",
        "--host",
        "--logprobs-mode",
        "--max-lora-rank",
        "--model",
        "--port",
        "--served-model-name",
        "--uds",
    }
)


class VllmSettings(Settings):
    urls: list[Annotated[str, Field(pattern=r"^https?://[^/\s]+")]] = execution(
        [],
        description="Addresses of running vLLM servers, which share the work, e.g. http://10.0.0.5:8000. Empty starts "
        "one on this machine, which ends with the run.",
    )
    python: str | None = execution(
        None, pattern=NOT_BLANK, description="Interpreter of the environment that has vllm; null takes this one."
    )
    arguments: list[Annotated[str, Field(pattern=NOT_BLANK)]] = Field(
        default_factory=list,
        description="Further arguments of our server, each word one, e.g. [--quantization, fp8]. They enter the keys.",
    )
    lora: Literal["adapter", "merged"] = Field(
        "adapter",
        description="Under model.lora_rank: adapters are loaded into the server, or merged into its weights, which "
        "rounds them to model.dtype but works with every architecture.",
    )
    weights_folder: str | None = execution(
        None,
        pattern=NOT_BLANK,
        description="Where each policy's weights are published for the servers, which must see it under the same "
        "path; null takes a folder of the run. A folder in memory (/dev/shm/...) makes updates faster.",
    )
    gpu_memory_utilization: float = execution(
        0.45, gt=0, le=1, description="Share of the GPU's memory for our server; the rest is for training."
    )
    cpu_cache_gib: int = execution(1, ge=1, description="Key-value cache of our server on a CPU, GiB.")
    while_training: Literal["auto", "keep", "sleep", "stop"] = execution(
        "auto",
        description="The server during an update: keep it as it is, let it free its GPU memory (sleep), or stop our "
        "server and start it again. auto: sleep for our server on a GPU, else keep.",
    )
    api_key_env: str | None = execution(
        None, pattern=r"^[A-Za-z_]\w*$", description="Environment variable with the key of `urls`; null sends none."
    )
    concurrency: int = execution(256, ge=1, le=65536, description="Requests at once, to each server.")
    start_timeout_seconds: float = execution(600.0, gt=0, description="Until our server answers.")
    timeout_seconds: float = execution(600.0, gt=0, description="For one completion, from its start to its end.")
    retries: int = execution(3, ge=0, description="Of a request after 429, 5xx, a timeout or a lost connection.")
    backoff_seconds: float = execution(1.0, ge=0, description="First delay before a retry; doubles, with jitter.")
    probe_tolerance: float | None = execution(
        None,
        gt=0,
        description="Largest mean difference of the server's logprobs of fixed tokens from the policy's own, in nats; "
        "beyond it the server holds other weights. null: 0.02 in float32, 0.3 in bfloat16.",
    )

    @model_validator(mode="after")
    def _parts_fit(self) -> Self:
        for url in self.urls:
            parts = urlsplit(url)
            if "@" in parts.netloc or parts.query or parts.fragment:
                raise ValueError("urls must hold no user, password or query: a key belongs in the variable api_key_env")
        if len({url.rstrip("/") for url in self.urls}) < len(self.urls):
            raise ValueError(f"urls must differ, got {self.urls}")
        if self.urls:
            self._refuse(OF_MANAGED_SERVER, "with urls: those servers run already")
            if self.weights_folder is None:
                raise ValueError(
                    "weights_folder must name a folder that the servers of urls see under the same path: each update's "
                    "weights go through it"
                )
            if self.while_training == "stop":
                raise ValueError("while_training stop is for our own server; those of urls may keep or sleep")
        elif self.api_key_env is not None:
            raise ValueError("api_key_env has no effect without urls: our own server gets a random key")
        taken = RESERVED_ARGUMENTS & {word.partition("=")[0] for word in self.arguments}
        if taken:
            raise ValueError(f"arguments must not hold {', '.join(sorted(taken))}, which the engine sets itself")
        return self

    def _refuse(self, names: tuple[str, ...], why: str) -> None:
        fields = type(self).model_fields
        for name in names:
            if getattr(self, name) != fields[name].get_default(call_default_factory=True):
                raise ValueError(f"{name} has no effect {why}")
