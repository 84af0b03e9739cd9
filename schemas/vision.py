"""Sections of a configuration: images."""

from __future__ import annotations

from pydantic import Field, model_validator

from schemas.section import Section


class Vision(Section):
    """How the policy's processor turns an image into patches and tokens: that of Qwen2-VL and its successors, which resizes to
    a multiple of `patch * merge` within the limits and has one token for `merge * merge` patches."""

    patch: int = Field(default=14, ge=1, le=256, description="pixels of a patch's side")
    merge: int = Field(default=2, ge=1, le=16, description="patches of a token's side")
    min_pixels: int = Field(default=3136, ge=1, description="an image of fewer pixels is enlarged")
    max_pixels: int = Field(default=1_003_520, ge=1, description="an image of more pixels is reduced")
    placeholder: str = Field(
        default="",
        max_length=64,
        description="the token that stands for one row of the encoder's output, as <|image_pad|>; empty: the policy is trained on no images",
    )
    linear_cost: float = Field(
        default=1.0, ge=0, description="cost of encoding an image: this times its patches, plus"
    )
    quadratic_cost: float = Field(
        default=1 / 4096,
        ge=0,
        description="this times the sum over its frames of the square of their patches",
    )

    @model_validator(mode="after")
    def _ordered(self) -> Vision:
        if self.max_pixels < self.min_pixels:
            raise ValueError(f"max_pixels {self.max_pixels} is below min_pixels {self.min_pixels}")
        return self
