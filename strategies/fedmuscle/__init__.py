"""FedMuscle (2026): nodes with different models and different tasks align representations of a public set.

Each node trains its own model on its own task; on public batches it pulls its representations towards
those of M other nodes by the Muscle loss, a contrastive loss over all B^M tuples of peer samples whose
weights correct for what the peers already share among themselves.

Differences from the paper (the full text was not at hand; only its equations and tables were):

- The sum over tuples is factored and never materialised: the same number (`exact`), or a mean-field or
  sampled estimate for many peers. The paper's own way is kept as `naive`.
- The temperature grows linearly with the number of models. The paper's pair (0.2, 0.15) is that schedule
  at four models; kept fixed, it penalises agreement from seven peers on.
- Rows are unit length after the projector, which the accessible text implies but does not state.
- The order of public batches follows from (seed, round, step) and is checked by a digest.
"""
