"""The only reader of the environment. Every field is `ESPALIER_<FIELD>` there."""

from functools import cached_property, lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, SecretStr
from pydantic_settings import BaseSettings, SettingsConfigDict


class Settings(BaseSettings):
    """Where things are and how the parts reach each other. Defaults are the embedded platform of one machine."""

    model_config = SettingsConfigDict(env_prefix="ESPALIER_", frozen=True, extra="ignore")

    data_dir: Path = Field(default=Path(".espalier"), description="Folder that holds all state of the embedded platform.")
    database_url: str | None = Field(default=None, description="SQLAlchemy URL; default SQLite in the data folder.")
    broker_url: str | None = Field(default=None, description="Redis URL; default the Redis-protocol server that `espalier up` starts.")
    redis_port: int = Field(default=6390, description="Port of the Redis-protocol server that `espalier up` starts.")
    store_url: str | None = Field(
        default=None, description="Object store: a folder, file:// or s3://bucket/prefix; default a folder in the data folder."
    )
    s3_endpoint: str | None = Field(
        default=None, description="URL of an S3-compatible store; default AWS. http:// is allowed, for a store inside the cluster."
    )
    s3_region: str = Field(default="us-east-1", description="Region of the bucket; most S3-compatible stores take any.")
    s3_access_key_id: str | None = Field(default=None, description="S3 key id; default what the machine's own AWS configuration gives.")
    s3_secret_access_key: SecretStr | None = Field(default=None, description="S3 secret that goes with s3_access_key_id.")
    admin_key: SecretStr | None = Field(
        default=None, description="Key of the platform's operator; `espalier up` makes one in the data folder."
    )

    api_host: str = Field(default="127.0.0.1", description="Address the API listens on.")
    api_port: int = Field(default=8000, description="Port the API listens on.")
    engine_host: str = Field(
        default="127.0.0.1", description="Address the engine host listens on; it has no authentication of its own, keep it private."
    )
    engine_port: int = Field(default=8100, description="Port the engine host listens on.")
    engine_url: str | None = Field(default=None, description="Where workers reach the engine host; default the local one.")
    replica_urls: str | None = Field(
        default=None, description="Comma-separated serving replicas (vLLM or engine hosts); default the engine host."
    )

    base_model_name: str = Field(default="SmolLM2-135M-Instruct", description="Name of the base model in every request.")
    base_model_path: str | None = Field(
        default=None,
        description="Folder with config.json, tokenizer and safetensors; default SmolLM2-135M-Instruct converted from its pip package.",
    )
    device: Literal["auto", "cpu", "cuda", "npu"] = Field(default="auto", description="Where the engine computes.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="Precision of the base; auto is bfloat16 on an accelerator or a CPU with native bf16, else float32."
    )
    num_threads: int | None = Field(
        default=None, description="Threads of the engine's one compute team; default the cores this process may use."
    )
    max_num_seqs: int = Field(
        default=64, description="Sequences decoded at once by the local rollouts. 1 makes numerics independent of the batch."
    )
    micro_batch_tokens: int = Field(default=2048, description="Tokens in one packed forward and backward; bounds memory.")
    mixed_batches: bool = Field(
        default=True,
        description="Micro-batches of several jobs at once. Without, a job's training is the same to the last bit whoever else trains.",
    )
    max_resident_adapters: int = Field(
        default=64, ge=1, description="Adapters in training on the device at once; the others page to host memory and back."
    )
    activation_checkpointing: bool = Field(
        default=False,
        description="Keep each layer's input only and compute the layer again in the backward: less memory, a third more time.",
    )
    max_model_len: int = Field(default=2048, description="Tokens of prompt and completion together.")
    max_serving_adapters: int = Field(
        default=16, description="Adapters that the local engine keeps loaded for serving (least recently used leave)."
    )

    rollouts: Literal["local", "vllm"] = Field(default="local", description="What samples for training jobs.")
    vllm_url: str | None = Field(default=None, description="The vLLM server that samples when rollouts is vllm.")
    resolver_cache: Path | None = Field(
        default=None, description="Folder for the adapters that a vLLM server fetched, one server's alone; default one in the data folder."
    )
    resolver_cache_bytes: int = Field(default=8 * 2**30, description="Bound on that folder; the least recently used adapters leave.")

    lease_ttl_s: float = Field(default=30.0, description="Seconds without a heartbeat after which a job's holder counts as dead.")
    heartbeat_s: float = Field(default=5.0, description="Seconds between heartbeats of a job's holder.")
    sweep_interval_s: float = Field(default=10.0, description="Seconds between sweeps that re-dispatch what lost its holder.")
    max_job_deaths: int = Field(default=3, description="Holders that may die on one job before it fails.")
    worker_concurrency: int = Field(default=4, description="Jobs that one worker runs side by side.")
    max_upload_bytes: int = Field(default=512 * 2**20, description="Largest accepted file.")

    @cached_property
    def resolved_database_url(self) -> str:
        """SQLAlchemy URL with the default filled in."""
        return self.database_url or f"sqlite:///{(self.data_dir / 'espalier.db').absolute()}"

    @cached_property
    def resolved_broker_url(self) -> str:
        """Redis URL with the default filled in."""
        return self.broker_url or f"redis://127.0.0.1:{self.redis_port}/0"

    @cached_property
    def resolved_store_url(self) -> str:
        """Object store URL or folder with the default filled in."""
        return self.store_url or str((self.data_dir / "store").absolute())

    @cached_property
    def resolved_engine_url(self) -> str:
        """Base URL of the engine host."""
        return (self.engine_url or f"http://{self.engine_host}:{self.engine_port}").rstrip("/")

    @cached_property
    def resolved_replica_urls(self) -> tuple[str, ...]:
        """Base URLs of the serving replicas."""
        if not self.replica_urls:
            return (self.resolved_engine_url,)
        return tuple(url.strip().rstrip("/") for url in self.replica_urls.split(",") if url.strip())

    @cached_property
    def resolved_base_model_path(self) -> Path:
        """Folder of the base model."""
        return Path(self.base_model_path) if self.base_model_path else self.data_dir / "base" / self.base_model_name

    @cached_property
    def cache_dir(self) -> Path:
        """Folder for what can be made again."""
        return self.data_dir / "cache"


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The process's settings, read once. Tests call `get_settings.cache_clear()`."""
    return Settings()
