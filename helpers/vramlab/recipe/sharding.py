"""How a step is divided among ranks: the engine, what each rank holds, and where it stays."""

from dataclasses import dataclass

from .knobs import Refusals, check, documented, knob, refuse

STAGES = {
    "ddp": (0, 1),
    "fsdp": (2, 3),
    "deepspeed": (0, 1, 2, 3),
    "tensor": (0,),
    "pipeline": (0,),
}
OFFLOADS = {"fsdp": ("parameters",), "deepspeed": ("optimizer", "parameters")}
# Fields that one engine alone knows.
OF_ENGINE = {
    "schedule": "pipeline",
    "micro_batches": "pipeline",
    "wrap": "fsdp",
    "reshard_root": "fsdp",
    "dp_replicate_size": "fsdp",
    "cp_size": "fsdp",
    "memory_efficient_linear": "deepspeed",
    "sp_size": "deepspeed",
}
AT_STAGE_3 = ("reshard_root", "memory_efficient_linear")


@documented
@dataclass(frozen=True)
class Sharding:
    """Who holds what among `world_size` ranks (Rajbhandari et al. 2020).

    Engines "ddp" (stages 0, 1), "fsdp" (2, 3) and "deepspeed" (0 to 3) divide the batch; "tensor"
    and "pipeline" (0) give each rank a slice of every layer, or some of the layers, and all work on
    the same batch. Offloaded parameters take the optimizer with them.
    """

    stage: int = knob(
        3,
        choices=(0, 1, 2, 3),
        help="ZeRO stage, 0 to 3.",
        option=True,
        label="ZeRO stage",
    )
    world_size: int = knob(
        1,
        most=2**20,
        help="Ranks that share the model.",
        option=True,
        label="GPUs",
    )
    engine: str = knob(
        "fsdp",
        choices=tuple(STAGES),
        help="What divides the model.",
        option=True,
        label="Engine",
    )
    offload: str | None = knob(
        None,
        choices=("optimizer", "parameters"),
        help="What lives in host memory.",
        option=True,
    )
    rank: int = knob(
        0,
        least=0,
        help="Whose bytes are described; ranks differ where a size does not divide.",
    )
    wrap: str = knob(
        "layers",
        choices=("layers", "model"),
        help="FSDP's units: one a layer and the rest, or the model.",
    )
    reshard_root: bool = knob(
        False,
        help="Free FSDP's root after its forward pass too, as accelerate did before 1.14.",
    )
    memory_efficient_linear: bool = knob(
        True,
        help=(
            "DeepSpeed's linear layer, which keeps no gathered weight for backward. False: as "
            "before 0.19.4 where a model was built outside zero.Init."
        ),
    )
    schedule: str = knob(
        "1f1b",
        choices=("gpipe", "1f1b"),
        help="How a pipeline runs the parts of a batch.",
    )
    micro_batches: int = knob(
        1,
        most=2**16,
        help="Parts into which a pipeline divides a batch.",
    )
    dp_replicate_size: int = knob(
        1,
        most=2**20,
        help=(
            "Copies of the model among FSDP's ranks (hybrid sharding): each is divided among as "
            "many."
        ),
        option=True,
    )
    cp_size: int = knob(
        1,
        most=2**20,
        help=(
            "Neighbouring ranks that have one sample's tokens together (context parallel): each a "
            "part of them, and keys go around."
        ),
        option=True,
    )
    sp_size: int = knob(
        1,
        most=2**20,
        help=(
            "Neighbouring ranks of DeepSpeed that have one sample's tokens together (Ulysses): in "
            "attention each has a part of the heads."
        ),
        option=True,
    )

    def __post_init__(self) -> None:
        check(self, "sharding.")
        refuse(self, self._refusals(), "sharding.")

    def _refusals(self) -> Refusals:
        engine = f"engine {self.engine!r}"
        last = self.world_size - 1
        allowed = f"ranks of {self.world_size} go from 0 to {last}"
        yield "rank", self.rank > last, allowed
        copies = self.dp_replicate_size
        allowed = (
            f"copies of the model divide the {self.world_size} ranks into equal groups of 2 "
            "at least"
        )
        is_uneven = self.world_size % copies or self.world_size == copies
        yield "dp_replicate_size", copies > 1 and is_uneven, allowed
        of_copy = "world_size" if copies == 1 else "the ranks of a copy"
        allowed = f"as many ranks have one sample's tokens together, so it must divide {of_copy}, "
        allowed += str(self.shards)
        yield "cp_size", self.shards % self.cp_size, allowed
        allowed = "accelerate divides each of several copies among 2 groups of so many at least"
        yield "cp_size", copies > 1 and self.shards == self.cp_size > 1, allowed
        allowed = "as many ranks have one sample's tokens together, so it must divide world_size, "
        allowed += str(self.world_size)
        yield "sp_size", self.world_size % self.sp_size, allowed
        stages = STAGES[self.engine]
        known = " or ".join(map(str, stages))
        yield "stage", self.stage not in stages, f"{engine} has stage {known}"
        offloads = OFFLOADS.get(self.engine, ())
        known = " or ".join(offloads) or "nothing"
        is_other = self.offload and self.offload not in offloads
        yield "offload", is_other, f"{engine} offloads {known}"
        is_early = self.offload == "parameters" and self.stage < 3
        yield "offload", is_early, "parameters can be offloaded at stage 3 only"
        for name, owner in OF_ENGINE.items():
            is_changed = getattr(self, name) != getattr(type(self), name)
            yield name, is_changed and self.engine != owner, f"only engine {owner!r} knows it"
        for name in AT_STAGE_3:
            is_changed = getattr(self, name) != getattr(type(self), name)
            allowed = "only stage 3 gathers weights for each pass: leave it out"
            yield name, is_changed and self.stage != 3, allowed

    @property
    def shards(self) -> int:
        """The number of ranks that divide one copy of the model."""
        return self.world_size // self.dp_replicate_size

    @property
    def shard(self) -> int:
        """The rank's index among those."""
        # Ranks of one copy are neighbours: accelerate's mesh has dp_replicate as its outer
        # dimension.
        return self.rank % self.shards

    @property
    def ranks_of_sample(self) -> int:
        """The number of ranks that have one sample's tokens together."""
        return self.cp_size * self.sp_size

    @property
    def parallelism(self) -> dict[str, int]:
        """The arguments of accelerate's `ParallelismConfig`; {} where it needs none."""
        if self.sp_size > 1:
            return {"sp_size": self.sp_size, "dp_shard_size": self.world_size // self.sp_size}
        sizes = {"dp_replicate_size": self.dp_replicate_size, "cp_size": self.cp_size}
        if self.dp_replicate_size == self.cp_size == 1:
            return {}
        return {**sizes, "dp_shard_size": self.shards // self.cp_size}

    def words(self) -> str:
        """Return its part of `str(recipe)`."""
        ranks = str(self.world_size)
        if self.dp_replicate_size > 1:
            ranks = f"{self.shards} × {self.dp_replicate_size} copies"
        if self.cp_size > 1:
            ranks += f" · context over {self.cp_size}"
        if self.sp_size > 1:
            ranks += f" · Ulysses over {self.sp_size}"
        offload = f" · {self.offload} offloaded" if self.offload else ""
        root = " · root resharded" if self.reshard_root else ""
        linear = "" if self.memory_efficient_linear else " · plain linear layers"
        return f"{self.engine} stage {self.stage} × {ranks}{offload}{root}{linear}"
