"""The encoder network: token ids in, one vector a token out.

BERT (https://arxiv.org/abs/1810.04805): embeddings, then layers of self-attention and a feed-forward network, each followed by
a residual sum and a LayerNorm. Letters B T N H D F V as in kernels/attention/contract.py.

Numbers: the matrices have the type the network computes in, and matmuls take their inputs in it; everything else
(their results, biases, GELU, residual sums, norms) is float32: with bfloat16 matrices that is as fast as rounding the
results, and closer to float32.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float, Int

from model.config import EncoderConfig

# attention(qkv [B, T, 3NH], segment_ids [B, T], num_heads=N) -> [B, T, NH]; its meaning is in
# kernels/attention/contract.py, and the network knows nothing else of it.
Attention = Callable[..., Array]


# Phi(y) = 1/2 + y * P(y * y) for |y| <= PHI_LIMIT, beyond which it is 0 or 1. P by least squares reweighted until
# the largest error of x * Phi(x) no longer fell, with the ends tied to 0 and 1; highest power first.
PHI_LIMIT = 4.2
PHI = (
    -9.01752203e-10, 7.94133232e-08, -3.03792955e-06, 6.68906656e-05,
    -0.000950657251, 0.00929822816, -0.0655281995, 0.398465871,
)  # fmt: skip


class Dense(nnx.Module):
    """x @ kernel + bias: kernel [inputs, outputs] in the computing type, bias and result float32."""

    def __init__(self, inputs: int, outputs: int, dtype: jnp.dtype) -> None:
        self.kernel = nnx.Param(jnp.zeros((inputs, outputs), dtype))
        self.bias = nnx.Param(jnp.zeros((outputs,), jnp.float32))

    def __call__(self, x: Float[Array, "*shape inputs"]) -> Float[Array, "*shape outputs"]:
        kernel = self.kernel[...]
        # By default TPUs (and some GPUs) multiply float32 in fewer bits; HIGHEST keeps it float32. To bfloat16 it
        # means nothing: the same estimated cycles when compiled for v5e, where float32 takes five times as many.
        product = jnp.matmul(
            x.astype(kernel.dtype), kernel,
            precision=jax.lax.Precision.HIGHEST, preferred_element_type=jnp.float32,
        )  # fmt: skip
        return product + self.bias[...]


class LayerNorm(nnx.Module):
    """(x - mean) / sqrt(variance + epsilon) * scale + bias over the last axis (https://arxiv.org/abs/1607.06450)."""

    def __init__(self, features: int, epsilon: float) -> None:
        self.scale = nnx.Param(jnp.ones((features,), jnp.float32))
        self.bias = nnx.Param(jnp.zeros((features,), jnp.float32))
        self.epsilon = epsilon

    def __call__(self, x: Float[Array, "*shape D"]) -> Float[Array, "*shape D"]:
        centred = x - x.mean(-1, keepdims=True)
        variance = jnp.square(centred).mean(-1, keepdims=True)
        return centred * jax.lax.rsqrt(variance + self.epsilon) * self.scale[...] + self.bias[...]


class Embeddings(nnx.Module):
    """The sum of what a token is and where it stands, normed.

    Every token is of type 0 in a document that stands alone; that type's vector is part of `position`.
    """

    def __init__(self, config: EncoderConfig) -> None:
        D = config.embedding_dimensions
        self.word = nnx.Param(jnp.zeros((config.vocabulary_size, D), jnp.float32))
        self.position = nnx.Param(jnp.zeros((config.positions, D), jnp.float32))
        self.norm = LayerNorm(D, config.norm_epsilon)

    def __call__(
        self, token_ids: Int[Array, "B T"], positions: Int[Array, "B T"]
    ) -> Float[Array, "B T D"]:
        return self.norm(self.word[...][token_ids] + self.position[...][positions])


class Layer(nnx.Module):
    def __init__(self, config: EncoderConfig, dtype: jnp.dtype) -> None:
        D, F = config.embedding_dimensions, config.feedforward_dimensions
        self.heads, self.dtype = config.heads, dtype
        self.qkv = Dense(D, 3 * D, dtype)
        self.out = Dense(D, D, dtype)
        self.attention_norm = LayerNorm(D, config.norm_epsilon)
        self.up = Dense(D, F, dtype)
        self.down = Dense(F, D, dtype)
        self.feedforward_norm = LayerNorm(D, config.norm_epsilon)

    def __call__(
        self, x: Float[Array, "B T D"], segment_ids: Int[Array, "B T"], attention: Attention
    ) -> Float[Array, "B T D"]:
        qkv = self.qkv(x).astype(self.dtype)
        context = attention(qkv, segment_ids, num_heads=self.heads)
        x = self.attention_norm(x + self.out(context))
        return self.feedforward_norm(x + self.down(gelu(self.up(x), self.dtype)))


class Encoder(nnx.Module):
    """The network of a config, with zeros for weights (model/checkpoint.py has the real ones).

    Args:
      dtype: what matmuls compute in, float32 or bfloat16.
    """

    def __init__(self, config: EncoderConfig, dtype: jnp.dtype) -> None:
        self.embeddings = Embeddings(config)
        self.layers = nnx.List([Layer(config, dtype) for _ in range(config.layers)])

    def __call__(
        self,
        token_ids: Int[Array, "B T"],
        segment_ids: Int[Array, "B T"],
        positions: Int[Array, "B T"],
        attention: Attention,
    ) -> Float[Array, "B T D"]:
        """float32 hidden states of the last layer.

        `segment_ids` is 0 for padding and 1, 2, … for the texts that share a row, which do not see each other;
        `positions` counts from 0 in each text. What stands at padding is undefined.
        """
        x = self.embeddings(token_ids, positions)
        for layer in self.layers:
            x = layer(x, segment_ids, attention)
        return x


def gelu(x: Float[Array, "*shape"], dtype: jnp.dtype) -> Float[Array, "*shape"]:
    """x * Phi(x), Phi being the normal distribution function (https://arxiv.org/abs/1606.08415, equation 1).

    Exact to rounding if the network computes in float32. If it computes in bfloat16, Phi is a polynomial, itself
    evaluated in float32: off by at most 9e-5, an eighth of what rounding to bfloat16 does to 0.2, and it
    takes a tenth off the whole network's time on CPU (tests/benchmarks/encoder.py).
    """
    if dtype == jnp.float32:
        return jax.nn.gelu(x, approximate=False)
    y = jnp.clip(x, -PHI_LIMIT, PHI_LIMIT)
    t, p = y * y, jnp.float32(0)
    for coefficient in PHI:
        p = p * t + coefficient
    result: Array = x * (0.5 + y * p)
    return result
