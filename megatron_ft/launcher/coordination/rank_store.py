from torch.distributed import TCPStore
from datetime import timedelta
class RankStore:
    def __init__(self, *, local_addr=None, address=""):
        self.store=None
        self.local=local_addr or "localhost"
    def open(self):
        self.store=None
        self.store=TCPStore(self.local,0,None,True,wait_for_workers=False)
        return f"{self.local}:{self.store.port}"
    def connect(self, address):
        host,port=address.rsplit(":",1)
        return TCPStore(host,int(port),None,False,timedelta(seconds=60))
    def close(self):
        self.store=None
