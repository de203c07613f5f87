"""DiT's diffusion schedule (arXiv 2212.09748): what the objective and the samplers must agree on."""

NUM_TRAIN_TIMESTEPS = 1000
BETA_START, BETA_END = 1e-4, 0.02  # linear in between
