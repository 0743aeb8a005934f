from torch.distributed.elastic.rendezvous.api import *
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo
from torch.distributed.elastic.rendezvous import rendezvous_handler_registry
class H(RendezvousHandler):
    use_agent_store=True
    def __init__(self,c,s,run_id): self.c,self.s,self.r=c,s,run_id
    def get_backend(self): return "megatron_ft"
    def next_rendezvous(self):
        held=self.c.begun
        host,port=held.store.rsplit(":",1)
        store=self.s.store if held.place==0 else self.s.connect(held.store)
        return RendezvousInfo(store,held.place,held.decision.world,RendezvousStoreInfo(host,int(port)))
    def is_closed(self): return False
    def set_closed(self): pass
    def num_nodes_waiting(self): return 0
    def get_run_id(self): return self.r
    def shutdown(self): return True
def register(config,*,coordination,store):
    rendezvous_handler_registry._registry.pop("megatron_ft",None)
    rendezvous_handler_registry.register("megatron_ft",lambda p: H(coordination,store,p.run_id))
    config.rdzv_backend="megatron_ft"
