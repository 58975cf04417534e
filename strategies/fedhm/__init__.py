"""FedHM: one full model on the server, low-rank factors of it at each node's own rank.

Yao et al., "FedHM: Efficient Federated Learning for Heterogeneous Models via Low-rank Factorization", 2021,
https://arxiv.org/abs/2111.14655.
"""
