"""FedMuscle (2026): nodes with different models and different tasks align representations of a public set.

Each node trains its own model on its own task; on public batches it pulls its representations towards
those of M other nodes by the Muscle loss, a contrastive loss over all B^M tuples of peer samples whose
weights correct for what the peers already share among themselves.

Differences from the paper (the full text was not at hand; only its equations and tables were):

- The sum over tuples is factored and never materialised: the same number (`exact`), or a mean-field or
  sampled estimate for many peers. The paper's own way is kept as `naive`.
- The temperature grows linearly with the number of models. The paper's pair (0.2, 0.15) is that schedule
  at four models; kept fixed, it penalises agreement from seven peers on.
- Rows are unit length after the projector, which the accessible text implies but does not state. The projector is one
  Linear, trained on public batches only; the head reads the model's own representation.
- The order of public batches follows from (seed, round, step) and is checked by a digest. Peers are drawn anew for each
  node and exchange; where fewer replied, M and the temperatures are those of the ones that did.
- By default representations travel with the training messages and are one round old (`fedmuscle.exchange = round`), so that
  a round takes one exchange instead of 1 + T; then a node meets the same peers on all T batches of a round. `step` is the
  paper's way. The server relays the peers' matrices, and never builds tuples; with `gradient` it returns dL/dZ.
- Contrastive steps move extractor and projector in evaluation mode (BatchNorm frozen, no dropout), by AdamW whose state
  survives rounds. They leave the head behind: evaluation and export use the model after local training. With `step` and
  `gradient` the last round's contrastive phase therefore shows in no number.
- Whole extractors are trained unless `fedmuscle.lora-modules` names what gets LoRA factors; then these, head and projector
  are, in both phases. Which modules the paper adapts, and its alpha, could not be found; here alpha is twice the rank.
- Public items may be seen through random views of each node's own (`fedmuscle.public-views`, off by default).
- Prefixes (`fedmuscle.prefixes`, off by default) are not in the paper: the mean of the Muscle loss over prefixes of the
  common space, and that of the task's loss over prefixes of the representation through one head (MRL-E).
- Nor are inner layers (`fedmuscle.inner-layers`, off by default): local steps add the task's loss after one drawn layer and
  pull its representation towards the last one's (2DMSE). The last layer is the teacher and gets no gradient from that.

The contrastive loss in the results is a mean over steps and nodes; evaluated by mean field it is a bound, at most the loss.
"""
