//! The network between the members: a relay before each, which can cut a member off. Clients stay connected.

use std::io::{Read, Write, copy};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::sync::{Arc, Mutex};
use std::thread::spawn;

#[derive(Default)]
struct State {
    /// The ids of members that are cut off.
    cut: Vec<String>,
    /// The ends of each connection with the sockets.
    open: Vec<(String, usize, [TcpStream; 2])>,
}

/// The relays.
#[derive(Clone, Default)]
pub(crate) struct Links {
    state: Arc<Mutex<State>>,
    /// The id of each member, once it is known.
    ids: Arc<Mutex<Vec<String>>>,
}

impl Links {
    /// A relay before a member, and its address.
    pub(crate) fn before(&self, member: usize, address: String) -> String {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let relay = listener.local_addr().unwrap().to_string();
        let links = self.clone();
        spawn(move || {
            for stream in listener.incoming() {
                let (links, address) = (links.clone(), address.clone());
                // etcd sees a failure here as a broken connection.
                spawn(move || links.relay(stream.ok()?, member, &address));
            }
        });
        relay
    }

    fn relay(&self, mut from: TcpStream, member: usize, address: &str) -> Option<()> {
        // rafthttp names the sender in each request.
        let mut head = Vec::new();
        while !head.ends_with(b"\r\n\r\n") {
            let mut byte = [0];
            from.read_exact(&mut byte).ok()?;
            head.push(byte[0]);
        }
        let text = String::from_utf8_lossy(&head);
        let sender = text.lines().find_map(|line| line.strip_prefix("X-Server-From: ")).unwrap_or_default().to_owned();
        let mut to = TcpStream::connect(address).ok()?;
        {
            let mut state = self.state.lock().unwrap();
            if state.cut.contains(&sender) || state.cut.contains(&self.id(member)) {
                return None;
            }
            state.open.push((sender, member, [from.try_clone().ok()?, to.try_clone().ok()?]));
        }
        to.write_all(&head).ok()?;
        let (mut back_from, mut back_to) = (to.try_clone().ok()?, from.try_clone().ok()?);
        spawn(move || {
            let _ = copy(&mut back_from, &mut back_to);
            let _ = back_to.shutdown(Shutdown::Both);
        });
        let _ = copy(&mut from, &mut to);
        let _ = to.shutdown(Shutdown::Both);
        Some(())
    }

    fn id(&self, member: usize) -> String {
        self.ids.lock().unwrap().get(member).cloned().unwrap_or_else(|| format!("member {member}"))
    }

    pub(crate) fn name(&self, ids: Vec<String>) {
        *self.ids.lock().unwrap() = ids;
    }

    /// Nothing passes between this member and the others.
    pub(crate) fn cut(&self, member: usize) {
        let id = self.id(member);
        let mut state = self.state.lock().unwrap();
        state.open.retain(|(sender, target, sockets)| {
            let affected = *sender == id || *target == member;
            if affected {
                for socket in sockets {
                    let _ = socket.shutdown(Shutdown::Both);
                }
            }
            !affected
        });
        state.cut.push(id);
    }

    /// All are connected again.
    pub(crate) fn mend(&self) {
        self.state.lock().unwrap().cut.clear();
    }
}
