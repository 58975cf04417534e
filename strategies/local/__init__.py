"""Every node trains its own model on its own data; nothing is exchanged. What joining must beat."""
