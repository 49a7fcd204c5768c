"""server.py BUCKET: an S3 server in memory on a free port of loopback, which it prints. Ends when standard input does."""

import sys

from moto.server import ThreadedMotoServer
import boto3

server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
server.start()
host, port = server.get_host_and_port()
client = boto3.client(
    "s3",
    endpoint_url=f"http://{host}:{port}",
    aws_access_key_id="any",
    aws_secret_access_key="any",
    region_name="us-east-1",
)
client.create_bucket(Bucket=sys.argv[1])
print(port, flush=True)
sys.stdin.read()
server.stop()
