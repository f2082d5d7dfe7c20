# SPDX-License-Identifier: MIT
"""A denoiser of pictures: a residual block of a variational autoencoder, and convolutions."""
