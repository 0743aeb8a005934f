"""The control plane's decisions: who coordinates, who trains with whom, what follows when something fails. No I/O."""
