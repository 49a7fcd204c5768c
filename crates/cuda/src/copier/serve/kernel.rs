//! The kernel that names memory: it computes BLAKE3 of each 256 KiB, which is also the name of such a chunk in the store.
//!
//! It is written in PTX, the driver's assembler, which the driver compiles for the GPU that is there. So nothing of CUDA's
//! compiler is needed to build rekindle, and a new GPU needs no new rekindle. Before a result is used, [`super::gpus`] compares
//! results with those of the processor.
//!
//! One block of 256 threads names 256 KiB. Each thread hashes 1 KiB, a "chunk" of BLAKE3, in 16 blocks of 64 bytes. Then half of
//! the threads join two hashes each, then a quarter, and so on: the binary tree of BLAKE3 (its paper, sections 2.4 and 2.5).

use std::ffi::CStr;
use std::fmt::Write;

/// Bytes that one name is of. The store cuts files there, too.
pub(super) const NAMED: u64 = 256 << 10;
/// BLAKE3 of so many bytes.
pub(super) type Name = [u8; 32];
/// Threads of a block, one for each KiB.
pub(super) const THREADS: u32 = 256;
/// The kernel's name. Its arguments are addresses: of the memory, and of 32 bytes for each block.
pub(super) const ENTRY: &CStr = c"name_memory";

const IV: [u32; 8] =
    [0x6A09_E667, 0xBB67_AE85, 0x3C6E_F372, 0xA54F_F53A, 0x510E_527F, 0x9B05_688C, 0x1F83_D9AB, 0x5BE0_CD19];
/// Where each word of a block is in the next round.
const PERMUTATION: [usize; 16] = [2, 6, 3, 10, 7, 0, 4, 13, 1, 11, 12, 5, 9, 14, 15, 8];
/// The words of the state that are mixed with each other in a round: columns, then diagonals.
const MIXED: [[u8; 4]; 8] = [
    [0, 4, 8, 12],
    [1, 5, 9, 13],
    [2, 6, 10, 14],
    [3, 7, 11, 15],
    [0, 5, 10, 15],
    [1, 6, 11, 12],
    [2, 7, 8, 13],
    [3, 4, 9, 14],
];
const CHUNK_START: u32 = 1;
const CHUNK_END: u32 = 2;
const PARENT: u32 = 4;
const ROOT: u32 = 8;

/// The program. PTX ISA 6.0 and sm_50 are the oldest that a driver with process checkpoints (570) knows.
pub(super) fn ptx() -> String {
    let [first, last, parent, root] = [CHUNK_START, CHUNK_END, PARENT, PARENT | ROOT];
    let mut text = String::with_capacity(80 << 10);
    text.push_str(
        ".version 6.0\n.target sm_50\n.address_size 64\n\
         .visible .entry name_memory(.param .u64 memory, .param .u64 names)\n{\n\
         .reg .pred %p<2>;\n.reg .b32 %v<16>;\n.reg .b32 %m<16>;\n.reg .b32 %h<8>;\n.reg .b32 %r<7>;\n.reg .b64 %a<2>;\n\
         .shared .align 16 .b8 tree[8192];\n",
    );
    let names = [("thread", 0), ("block", 1), ("tree", 2), ("own", 3), ("pair", 4), ("count", 5), ("flags", 6)];
    let mut add = |lines: &str| {
        for line in lines.lines() {
            let mut line = line.trim().to_owned();
            for (name, number) in names {
                line = line.replace(&format!("%{name}"), &format!("%r{number}"));
            }
            text.push_str(&line);
            text.push('\n');
        }
    };
    add("mov.u32 %thread, %tid.x;
         mov.u32 %block, %ctaid.x;
         ld.param.u64 %a0, [memory];
         ld.param.u64 %a1, [names];
         mad.wide.u32 %a0, %block, 262144, %a0;
         mad.wide.u32 %a0, %thread, 1024, %a0;
         mad.wide.u32 %a1, %block, 32, %a1;
         mov.u32 %tree, tree;
         shl.b32 %own, %thread, 5;
         add.u32 %own, %own, %tree;
         shl.b32 %pair, %thread, 6;
         add.u32 %pair, %pair, %tree;");
    // A KiB by each thread.
    add(&initial());
    add(&format!("mov.u32 %count, 0;\nmov.u32 %flags, {first};\nKIB:"));
    add(&message("ld.global.v4.u32", "%a0"));
    add(&compression("%thread"));
    add(&format!(
        "add.u64 %a0, %a0, 64;
         add.u32 %count, %count, 1;
         setp.eq.u32 %p0, %count, 15;
         selp.b32 %flags, {last}, 0, %p0;
         setp.lt.u32 %p1, %count, 16;
         @%p1 bra KIB;"
    ));
    add("st.shared.v4.u32 [%own], {%h0, %h1, %h2, %h3};
         st.shared.v4.u32 [%own+16], {%h4, %h5, %h6, %h7};
         mov.u32 %count, 128;
         JOIN:
         bar.sync 0;
         setp.ge.u32 %p0, %thread, %count;
         @%p0 bra READ;");
    add(&message("ld.shared.v4.u32", "%pair"));
    // A thread writes where its neighbour has read.
    add("READ:
         bar.sync 0;
         @%p0 bra WRITTEN;");
    add(&initial());
    add(&format!("setp.eq.u32 %p1, %count, 1;\nselp.b32 %flags, {root}, {parent}, %p1;"));
    add(&compression("0"));
    add("st.shared.v4.u32 [%own], {%h0, %h1, %h2, %h3};
         st.shared.v4.u32 [%own+16], {%h4, %h5, %h6, %h7};
         WRITTEN:
         shr.u32 %count, %count, 1;
         setp.ne.u32 %p1, %count, 0;
         @%p1 bra JOIN;
         setp.ne.u32 %p0, %thread, 0;
         @%p0 bra END;
         st.global.v4.u32 [%a1], {%h0, %h1, %h2, %h3};
         st.global.v4.u32 [%a1+16], {%h4, %h5, %h6, %h7};
         END:
         ret;");
    text.push_str("}\n");
    text
}

fn initial() -> String {
    IV.iter().enumerate().fold(String::new(), |mut text, (at, word)| {
        let _ = writeln!(text, "mov.u32 %h{at}, {word};");
        text
    })
}

/// Loads the 16 words of a block of 64 bytes.
fn message(load: &str, address: &str) -> String {
    (0..4).fold(String::new(), |mut text, quarter| {
        let [a, b, c, d] = [0, 1, 2, 3].map(|word| 4 * quarter + word);
        let _ = writeln!(text, "{load} {{%m{a}, %m{b}, %m{c}, %m{d}}}, [{address}+{}];", 16 * quarter);
        text
    })
}

/// One compression: a block of 64 bytes into the eight words of the hash.
fn compression(counter: &str) -> String {
    let mut text = String::with_capacity(32 << 10);
    let mut line = |words: std::fmt::Arguments<'_>| {
        let _ = text.write_fmt(words);
        text.push('\n');
    };
    for at in 0..8 {
        line(format_args!("mov.u32 %v{at}, %h{at};"));
    }
    for (at, word) in (8..).zip(&IV[..4]) {
        line(format_args!("mov.u32 %v{at}, {word};"));
    }
    for (at, value) in [(12, counter), (13, "0"), (14, "64"), (15, "%flags")] {
        line(format_args!("mov.u32 %v{at}, {value};"));
    }
    let mut words: [usize; 16] = std::array::from_fn(|at| at);
    for _ in 0..7 {
        for ([a, b, c, d], pair) in MIXED.iter().zip(words.as_chunks::<2>().0) {
            for (word, [turn, other]) in pair.iter().zip([[16, 12], [8, 7]]) {
                line(format_args!("add.u32 %v{a}, %v{a}, %v{b};"));
                line(format_args!("add.u32 %v{a}, %v{a}, %m{word};"));
                line(format_args!("xor.b32 %v{d}, %v{d}, %v{a};"));
                line(format_args!("shf.r.wrap.b32 %v{d}, %v{d}, %v{d}, {turn};"));
                line(format_args!("add.u32 %v{c}, %v{c}, %v{d};"));
                line(format_args!("xor.b32 %v{b}, %v{b}, %v{c};"));
                line(format_args!("shf.r.wrap.b32 %v{b}, %v{b}, %v{b}, {other};"));
            }
        }
        words = PERMUTATION.map(|from| words[from]);
    }
    for at in 0..8 {
        line(format_args!("xor.b32 %h{at}, %v{at}, %v{};", at + 8));
    }
    text
}

#[cfg(test)]
mod tests;
