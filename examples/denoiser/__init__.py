# SPDX-License-Identifier: MIT
"""A denoiser of pictures around one residual block of a variational autoencoder."""
