package cpu

import (
	"fmt"
	"slices"

	"agentrun.dev/internal/vmm/kvm"
)

// featureWord is a register of CPUID. Each of its bits is a feature that a
// program may use.
type featureWord struct {
	leaf, index uint32
	register    string
}

// name is the name of a word: leaf, subleaf and register.
func (w featureWord) name() string { return fmt.Sprintf("%x.%d.%s", w.leaf, w.index, w.register) }

var featureWords = []featureWord{
	{leafFeatures, 0, "ecx"}, {leafFeatures, 0, "edx"},
	{leafExtFeatures, 0, "ebx"}, {leafExtFeatures, 0, "ecx"}, {leafExtFeatures, 0, "edx"},
	{leafExtFeatures, 1, "eax"}, {leafExtFeatures, 1, "edx"},
	{leafXState, 0, "eax"}, {leafXState, 1, "eax"},
	{leafKVMFeatures, 0, "eax"},
	{leafAMDFeatures, 0, "ecx"}, {leafAMDFeatures, 0, "edx"}, {leafAMDAddress, 0, "ebx"},
}

// Features returns the features that a guest of this profile sees on this host:
// CPUID words by name, without words that are zero.
func (p Profile) Features(sys *kvm.System) (map[string]uint32, error) {
	supported, err := sys.SupportedCPUID()
	if err != nil {
		return nil, err
	}
	entries, err := p.Apply(supported, sys.CheckExtension(kvm.CapTSCDeadlineTimer) != 0)
	if err != nil {
		return nil, err
	}
	features := map[string]uint32{}
	for _, w := range featureWords {
		i := slices.IndexFunc(entries, func(e kvm.CPUIDEntry) bool { return e.Function == w.leaf && e.Index == w.index })
		if i < 0 {
			continue
		}
		e := entries[i]
		if v := map[string]uint32{"eax": e.EAX, "ebx": e.EBX, "ecx": e.ECX, "edx": e.EDX}[w.register]; v != 0 {
			features[w.name()] = v
		}
	}
	return features, nil
}

// featureNames are the names of /proc/cpuinfo for the bits in which processors
// differ.
var featureNames = map[string]map[int]string{
	"1.0.ecx": {
		0: "sse3", 1: "pclmulqdq", 9: "ssse3", 12: "fma", 13: "cx16", 17: "pcid", 19: "sse4_1", 20: "sse4_2", 21: "x2apic",
		22: "movbe", 23: "popcnt", 24: "tsc_deadline_timer", 25: "aes", 26: "xsave", 28: "avx", 29: "f16c", 30: "rdrand",
	},
	"7.0.ebx": {
		0: "fsgsbase", 3: "bmi1", 4: "hle", 5: "avx2", 7: "smep", 8: "bmi2", 9: "erms", 10: "invpcid", 11: "rtm", 16: "avx512f",
		17: "avx512dq", 18: "rdseed", 19: "adx", 20: "smap", 21: "avx512ifma", 23: "clflushopt", 24: "clwb", 28: "avx512cd",
		29: "sha_ni", 30: "avx512bw", 31: "avx512vl",
	},
	"7.0.ecx": {
		1: "avx512vbmi", 2: "umip", 3: "pku", 6: "avx512_vbmi2", 8: "gfni", 9: "vaes", 10: "vpclmulqdq", 11: "avx512_vnni",
		12: "avx512_bitalg", 14: "avx512_vpopcntdq", 16: "la57", 22: "rdpid",
	},
	"7.0.edx":        {4: "fsrm", 23: "avx512_fp16"},
	"7.1.eax":        {4: "avx_vnni", 5: "avx512_bf16"},
	"d.1.eax":        {0: "xsaveopt", 1: "xsavec", 2: "xgetbv1", 3: "xsaves"},
	"80000001.0.ecx": {0: "lahf_lm", 5: "abm", 6: "sse4a", 8: "3dnowprefetch", 11: "xop", 16: "fma4"},
	"80000001.0.edx": {20: "nx", 26: "pdpe1gb", 27: "rdtscp", 29: "lm"},
}

// MissingFeatures lists the features in want that have lacks, by their names in
// /proc/cpuinfo or by their bit.
func MissingFeatures(want, have map[string]uint32) (missing []string) {
	words := make([]string, 0, len(want))
	for word := range want {
		words = append(words, word)
	}
	slices.Sort(words)
	for _, word := range words {
		lacks := want[word] &^ have[word]
		for bit := range 32 {
			if lacks&(1<<bit) == 0 {
				continue
			}
			name, ok := featureNames[word][bit]
			if !ok {
				name = fmt.Sprintf("bit %d of CPUID %s", bit, word)
			}
			missing = append(missing, name)
		}
	}
	return missing
}
