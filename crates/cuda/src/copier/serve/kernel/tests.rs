//! The kernel, run instruction by instruction, against the library that the store uses.

use std::collections::BTreeMap;

use super::*;

/// Where the memory and the names are for the kernel, and the number of the block that runs.
const MEMORY: u64 = 1 << 40;
const NAMES: u64 = 1 << 41;

/// One block of threads.
struct Block<'a> {
    program: Vec<Line<'a>>,
    labels: BTreeMap<&'a str, usize>,
    number: u32,
    memory: &'a [u8],
    names: Vec<u8>,
    tree: Vec<u8>,
}

struct Line<'a> {
    /// The register that decides whether it is done.
    unless: Option<&'a str>,
    op: &'a str,
    args: Vec<&'a str>,
}

#[derive(Default)]
struct Thread {
    number: u32,
    at: usize,
    registers: BTreeMap<String, u64>,
}

fn parse(text: &str) -> (Vec<Line<'_>>, BTreeMap<&str, usize>) {
    let (mut program, mut labels) = (Vec::new(), BTreeMap::new());
    let body = text.split_once("{\n").unwrap().1.trim_end_matches("}\n");
    for line in body.lines().filter(|line| !line.starts_with('.')) {
        if let Some(label) = line.strip_suffix(':') {
            labels.insert(label, program.len());
            continue;
        }
        let line = line.strip_suffix(';').unwrap();
        let (unless, line) = match line.strip_prefix('@') {
            Some(line) => line.split_once(' ').map(|(register, line)| (Some(register), line)).unwrap(),
            None => (None, line),
        };
        let (op, args) = line.split_once(' ').unwrap_or((line, ""));
        let args = args.split([',', ' ', '{', '}', '[', ']']).filter(|arg| !arg.is_empty()).collect();
        program.push(Line { unless, op, args });
    }
    (program, labels)
}

impl Block<'_> {
    /// Runs all threads from one barrier to the next.
    fn run(&mut self) {
        let mut threads: Vec<Thread> = (0..THREADS).map(|number| Thread { number, ..Thread::default() }).collect();
        loop {
            let waiting: Vec<bool> = threads.iter_mut().map(|thread| self.run_to_barrier(thread)).collect();
            assert!(waiting.iter().all(|one| *one == waiting[0]), "all threads come to each barrier");
            if !waiting[0] {
                return;
            }
        }
    }

    /// Whether it waits at a barrier now; it has ended otherwise.
    fn run_to_barrier(&mut self, thread: &mut Thread) -> bool {
        loop {
            let at = thread.at;
            thread.at += 1;
            let line = &self.program[at];
            if line.unless.is_some_and(|register| thread.value(self.number, register) == 0) {
                continue;
            }
            match (line.op, &line.args[..]) {
                ("bar.sync", _) => return true,
                ("ret", _) => return false,
                ("bra", [label]) => thread.at = self.labels[label],
                (load @ ("ld.global.v4.u32" | "ld.shared.v4.u32"), [a, b, c, d, address]) => {
                    let address = thread.address(self.number, address);
                    for (word, to) in [a, b, c, d].into_iter().enumerate() {
                        let at = address + 4 * word as u64;
                        let value = match load {
                            "ld.global.v4.u32" => word_of(self.memory, at - MEMORY),
                            _ => word_of(&self.tree, at),
                        };
                        thread.set(to, u64::from(value));
                    }
                }
                (store @ ("st.global.v4.u32" | "st.shared.v4.u32"), [address, words @ ..]) => {
                    let address = thread.address(self.number, address);
                    for (word, from) in words.iter().enumerate() {
                        let value = u32::try_from(thread.value(self.number, from)).unwrap();
                        let at = address + 4 * word as u64;
                        let (to, at) = if store == "st.global.v4.u32" {
                            (&mut self.names, at - NAMES)
                        } else {
                            (&mut self.tree, at)
                        };
                        to[usize::try_from(at).unwrap()..][..4].copy_from_slice(&value.to_le_bytes());
                    }
                }
                (op, [to, from @ ..]) => {
                    let from: Vec<u64> = from.iter().map(|from| thread.value(self.number, from)).collect();
                    thread.set(to, calculated(op, &from));
                }
                _ => panic!("{} {:?}", line.op, line.args),
            }
        }
    }
}

fn word_of(memory: &[u8], at: u64) -> u32 {
    let at = usize::try_from(at).unwrap();
    u32::from_le_bytes(*memory[at..].first_chunk().unwrap())
}

fn calculated(op: &str, from: &[u64]) -> u64 {
    let low = |value: u64| value & 0xFFFF_FFFF;
    match (op, from) {
        ("mov.u32" | "ld.param.u64", [a]) => *a,
        ("add.u32", [a, b]) => low(a + b),
        ("add.u64", [a, b]) => a + b,
        ("mad.wide.u32", [a, b, c]) => a * b + c,
        ("xor.b32", [a, b]) => a ^ b,
        ("shl.b32", [a, b]) => low(a << b),
        ("shr.u32", [a, b]) => a >> b,
        // The low half of both, shifted to the right: with the same twice, a rotation.
        ("shf.r.wrap.b32", [a, b, turn]) => low(((b << 32) | a) >> (turn & 31)),
        ("setp.eq.u32", [a, b]) => u64::from(a == b),
        ("setp.ne.u32", [a, b]) => u64::from(a != b),
        ("setp.lt.u32", [a, b]) => u64::from(a < b),
        ("setp.ge.u32", [a, b]) => u64::from(a >= b),
        ("selp.b32", [a, b, which]) => {
            if *which != 0 {
                *a
            } else {
                *b
            }
        }
        _ => panic!("{op} {from:?}"),
    }
}

impl Thread {
    fn set(&mut self, register: &str, value: u64) {
        assert!(register.starts_with('%'), "{register}");
        self.registers.insert(register.to_owned(), value);
    }

    fn value(&self, block: u32, name: &str) -> u64 {
        match name {
            "%tid.x" => u64::from(self.number),
            "%ctaid.x" => u64::from(block),
            "memory" => MEMORY,
            "names" => NAMES,
            "tree" => 0,
            register if register.starts_with('%') => self.registers[register],
            number => number.parse().unwrap(),
        }
    }

    fn address(&self, block: u32, text: &str) -> u64 {
        let (register, more) = text.split_once('+').unwrap_or((text, "0"));
        self.value(block, register) + more.parse::<u64>().unwrap()
    }
}

#[test]
fn the_kernel_computes_the_names_of_the_store() {
    let bytes = usize::try_from(NAMED).unwrap();
    let mut memory = vec![0; 2 * bytes];
    blake3::Hasher::new().update(b"any").finalize_xof().fill(&mut memory);
    let text = ptx();
    let (program, labels) = parse(&text);
    // The second one, so that the number of the block counts.
    let mut block = Block { program, labels, number: 1, memory: &memory, names: vec![0; 64], tree: vec![0; 8192] };
    block.run();
    assert_eq!(block.names[32..], *blake3::hash(&memory[bytes..]).as_bytes());
    assert_eq!(block.names[..32], [0; 32], "only its own");
}

#[test]
fn the_program_has_the_kernel_and_no_placeholder() {
    let text = ptx();
    assert!(text.contains(&format!(".visible .entry {}(", ENTRY.to_str().unwrap())));
    let known = ["%p", "%v", "%m", "%h", "%r", "%a", "%tid.x", "%ctaid.x"];
    for word in text.split(|c: char| !c.is_alphanumeric() && c != '%' && c != '.').filter(|word| word.starts_with('%'))
    {
        assert!(known.iter().any(|known| word.starts_with(known)), "{word}");
    }
}
